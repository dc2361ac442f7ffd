"""What is happening, for people and for the steering loop: one JSON object, shown by the admin port and the status page.

Sizes, times and decisions; never a prompt.
"""

from typing import Any

from tidegate_gateway.running_gateway import Gateway
from tidegate_policy import dispatcher


def snapshot(gateway: Gateway) -> dict[str, Any]:
    """Everything worth looking at, as JSON."""
    now = gateway.clock()
    status, reasons = gateway.problems()
    return {
        "gateway": getattr(gateway.kept, "gateway", None),
        "status": status,
        "reasons": reasons,
        "model": gateway.fleet.model,
        "policy": {
            "name": gateway.policy.name,
            "source": gateway.policy.source,
            "reason": gateway.policy.reason,
            "left_s": gateway.policy.left_s,
        },
        "dispatch": {
            "rule": gateway.core.dispatch.rule,
            "alpha": gateway.core.dispatch.alpha,
            "beta": gateway.core.dispatch.beta,
            "cap": gateway.told.dispatch.cap,
        },
        "calls": {"waiting": gateway.core.waiting, "out": gateway.core.out},
        "engines": [_engine(gateway, state, now) for state in gateway.core.engines()],
        "recent": [
            {
                "call": item.call,
                "ago_s": round(now - item.at_s, 3),
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
            for item in reversed(gateway.router.recent)
        ],
    }


def _engine(gateway: Gateway, state: dispatcher.EngineState, now: float) -> dict[str, Any]:
    known = gateway.fleet.known[state.id]
    own = gateway.core.own_backlog(state.id)
    return {
        "name": state.id,
        "url": known.address.url,
        "control": known.address.control,
        "node_pool": known.address.node_pool,
        "accepting": state.accepting,
        "reason": known.reason or ("ejected: its calls fail" if known.record.ejected(now) else None),
        "models": list(known.models),
        "policy": known.policy,
        "fallback": known.fallback,
        "profile": "calibrated online" if known.address.cost is None else "given",
        "simulated": known.simulated,
        "cap": state.cap,
        "calls": own.calls,
        "calls_of_others": state.others.calls,
        "backlog_s": round(state.cost.backlog_seconds(own + state.others), 4),
        "running": known.load.running,
        "waiting": known.load.waiting,
        "kv_usage": known.load.kv_usage,
    }
