"""The state of the gateway for people and for the steering loop: one JSON object, on the admin port.

It contains sizes, times and decisions, and never a prompt. `page_state` makes the smaller one of the status page from the
same parts. All work is bounded: one pass over the waiting calls, and one over the engines.
"""

import dataclasses
from typing import Any

from tidegate_gateway import running_gateway
from tidegate_gateway.observe import recent_decisions, recent_service
from tidegate_policy.dispatch import engine_table
from tidegate_policy.scale import call_load


def snapshot(gateway: running_gateway.Gateway) -> dict[str, Any]:
    """The whole state as JSON."""
    now = gateway.clock()
    return {
        **summary(gateway),
        "workflows": {
            **workflow_counts(gateway),
            "templates": {
                f"{template}\n{tenant}" if template else tenant: {
                    stage: {"calls": round(seen.calls, 2), "parallel": round(seen.parallel, 2), "seen": seen.seen}
                    for stage, seen in gateway.core.workflows.stages(tenant, template).items()
                }
                for tenant, template in gateway.core.workflows.templates
            },
        },
        "rollout": rollout(gateway),
        "load": load(gateway),
        "targets": {
            name: {"met": seen.met, "with_target": seen.with_target}
            for name, seen in gateway.metrics.service.since_start().items()
        },
        "tenant_shares": {tenant: round(share, 4) for tenant, share in gateway.core.tenant_service.shares(now).items()},
        "engines": [
            {
                **shown,
                "url": known.address.url,
                "control": known.address.control,
                "models": list(known.models),
                "profile": "none" if known.address.cost is None else "given",
                "service": gateway.metrics.engines.of(engine.facts.id).as_json(),
                "cost_equations": engine.estimate.learned,
                "cost_error": round(engine.estimate.mean_error, 4),
            }
            for engine, shown in zip(gateway.core.engines, engines(gateway), strict=True)
            if (known := gateway.discovery.known[engine.facts.id])
        ],
        "recent": [
            {
                **decision(item, now),
                "scores": {engine: round(score, 4) for engine, score in item.decision.scores.items()},
            }
            for item in reversed(gateway.recent)
        ],
    }


def summary(gateway: running_gateway.Gateway) -> dict[str, Any]:
    """The part of the state that has no list of engines, tenants or calls."""
    status, reasons = gateway.problems()
    dispatcher = gateway.core.dispatcher
    return {
        "gateway": getattr(gateway.link.store, "gateway", None),
        "status": status,
        "reasons": reasons,
        "store": {"reachable": gateway.link.reachable},
        "model": gateway.directory.served,
        "policy": policy(gateway),
        "dispatch": {
            "rule": dispatcher.settings.rule,
            "alpha": dispatcher.alpha,
            "beta": dispatcher.beta,
            "cap": gateway.settings.dispatch.cap,
        },
        "calls": {"waiting": dispatcher.waiting, "out": dispatcher.inflight},
    }


def load(gateway: running_gateway.Gateway) -> dict[str, Any]:
    """The work that this gateway has received since its start, and the part of it that waits here, with predicted lengths:
    the sums of `tidegate_policy.scale.call_load`, from which an autoscaler computes the engines that are needed."""
    waiting = call_load.of_calls(gateway.core.dispatcher.waiting_calls())
    return {
        "offered": dataclasses.asdict(gateway.core.offered.load),
        "waiting": dataclasses.asdict(waiting),
    }


def rollout(gateway: running_gateway.Gateway) -> dict[str, Any] | None:
    """The new engines and their share of the calls; None while calls are not divided."""
    split = gateway.core.dispatcher.split
    if split is None or (left_s := split.until_s - gateway.clock()) <= 0:
        return None
    return {"engines": sorted(split.engines), "weight": split.weight, "left_s": round(left_s, 1)}


def policy(gateway: running_gateway.Gateway) -> dict[str, Any]:
    """The active policy, and its last switches."""
    active, switches = gateway.policy.active, gateway.policy.switches
    return {
        "name": active.name,
        "parameters": dict(gateway.core.dispatcher.policy_parameters),
        "source": active.source,
        "reason": active.reason,
        "alternatives": list(active.alternatives),
        "expected": active.expected,
        "left_s": active.left_s,
        "since_s": round(switches.since_s, 1),
        "switches": switches.as_json(),
    }


def workflow_counts(gateway: running_gateway.Gateway) -> dict[str, Any]:
    """The workflows that are active here, and their bound."""
    gate = gateway.core.dispatcher.gate
    return {"active": gate.active, "waiting": gate.held, "limit": gate.limit}


def engines(gateway: running_gateway.Gateway) -> list[dict[str, Any]]:
    """Every engine as its callers may know it, without its addresses."""
    now = gateway.clock()
    accepting = {engine.facts.id for engine in gateway.core.engines.accepting(now)}
    return [_engine(gateway, engine, now, accepting=engine.facts.id in accepting) for engine in gateway.core.engines]


def _engine(
    gateway: running_gateway.Gateway, engine: engine_table.Engine, now: float, *, accepting: bool
) -> dict[str, Any]:
    known = gateway.discovery.known[engine.facts.id]
    return {
        "name": engine.facts.id,
        "node_pool": known.address.node_pool,
        "accepting": accepting,
        "reason": known.reason or ("ejected: its calls fail" if engine.record.ejected(now) else None),
        "policy": known.policy,
        "fallback": known.fallback,
        "simulated": known.simulated,
        "cap": engine.limit,
        "calls": engine.own.calls,
        "calls_of_others": engine.facts.others.calls,
        "backlog_s": round(engine.cost.backlog_seconds(engine.backlog), 4),
        "running": known.load.running,
        "waiting": known.load.waiting,
        "lanes": known.lanes,
        "kv_usage": known.load.kv_usage,
    }


def decision(item: recent_decisions.RecentDecision, now: float) -> dict[str, Any]:
    """A call that was sent, with the predictions at that moment."""
    slack_s = item.decision.slack_s
    return {
        "call": item.call,
        "ago_s": round(now - item.sent_at_s, 3),
        "tenant": item.tenant,
        "class": item.slo_class,
        "attempt": item.attempt,
        "engine": item.decision.engine,
        "rule": item.decision.rule,
        "queue_s": round(item.queue_s, 4),
        "engine_wait_s": round(item.decision.queue_s, 4),
        "service_s": round(item.decision.service_s, 4),
        "shared_s": round(item.decision.shared_s, 4),
        "slack_s": None if slack_s is None else round(slack_s, 4),
    }


def tally(seen: recent_service.Tally) -> dict[str, Any]:
    """Calls that ended."""
    return {
        **seen.summary(),
        "tokens": seen.tokens,
        "met": seen.met,
        "late": seen.late,
        "shed": seen.shed,
        "failed": seen.failed,
    }
