"""The state of the gateway for people and for the steering loop: one JSON object, on the admin port and the status page.

It contains sizes, times and decisions, and never a prompt.
"""

from typing import Any

from tidegate_gateway import running_gateway
from tidegate_policy.dispatch import engine_table


def snapshot(gateway: running_gateway.Gateway) -> dict[str, Any]:
    """The whole state as JSON."""
    now = gateway.clock()
    status, reasons = gateway.problems()
    policy, dispatcher = gateway.policy.active, gateway.core.dispatcher
    accepting = {engine.facts.id for engine in gateway.core.engines.accepting(now)}
    return {
        "gateway": getattr(gateway.link.store, "gateway", None),
        "status": status,
        "reasons": reasons,
        "model": gateway.discovery.served.name,
        "policy": {
            "name": policy.name,
            "source": policy.source,
            "reason": policy.reason,
            "left_s": policy.left_s,
        },
        "dispatch": {
            "rule": dispatcher.settings.rule,
            "alpha": dispatcher.settings.alpha,
            "beta": dispatcher.settings.beta,
            "cap": gateway.settings.dispatch.cap,
        },
        "calls": {"waiting": dispatcher.waiting, "out": dispatcher.inflight},
        "workflows": {
            "active": dispatcher.gate.active,
            "waiting": dispatcher.gate.held,
            "limit": dispatcher.gate.limit,
            "templates": {
                scope: {
                    stage: {"calls": round(seen.calls, 2), "parallel": round(seen.parallel, 2), "seen": seen.seen}
                    for stage, seen in gateway.core.workflows.stages(scope).items()
                }
                for scope in gateway.core.workflows.scopes
            },
        },
        "tenant_shares": {tenant: round(share, 4) for tenant, share in gateway.core.tenant_service.shares(now).items()},
        "engines": [
            _engine(gateway, engine, now, accepting=engine.facts.id in accepting) for engine in gateway.core.engines
        ],
        "recent": [
            {
                "call": item.call,
                "ago_s": round(now - item.sent_at_s, 3),
                "tenant": item.tenant,
                "class": item.slo_class,
                "attempt": item.attempt,
                "engine": item.decision.engine,
                "rule": item.decision.rule,
                "queue_s": round(item.decision.queue_s, 4),
                "service_s": round(item.decision.service_s, 4),
                "slack_s": None if item.decision.slack_s is None else round(item.decision.slack_s, 4),
                "scores": {engine: round(score, 4) for engine, score in item.decision.scores.items()},
            }
            for item in reversed(gateway.recent)
        ],
    }


def _engine(
    gateway: running_gateway.Gateway, engine: engine_table.Engine, now: float, *, accepting: bool
) -> dict[str, Any]:
    known = gateway.discovery.known[engine.facts.id]
    return {
        "name": engine.facts.id,
        "url": known.address.url,
        "control": known.address.control,
        "node_pool": known.address.node_pool,
        "accepting": accepting,
        "reason": known.reason or ("ejected: its calls fail" if engine.record.ejected(now) else None),
        "models": list(known.models),
        "policy": known.policy,
        "fallback": known.fallback,
        "profile": "none" if known.address.cost is None else "given",
        "cost_equations": engine.estimate.learned,
        "cost_error": round(engine.estimate.mean_error, 4),
        "simulated": known.simulated,
        "cap": engine.limit,
        "calls": engine.own.calls,
        "calls_of_others": engine.facts.others.calls,
        "backlog_s": round(engine.cost.backlog_seconds(engine.backlog), 4),
        "running": known.load.running,
        "waiting": known.load.waiting,
        "kv_usage": known.load.kv_usage,
    }
