"""The part of a pool's status that steering writes: the active policy, its memory, attainment, and the conditions
PolicyStable, ReportsCredible and StoreReachable (`store_status`); and the events of its switches. Pure."""

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidegate_control import steering_driver
from tidegate_operator import error_budget, pool_status, reconcile, spec, store_status
from tidegate_operator.spec import Json
from tidegate_policy import qos
from tidegate_policy.admit import entitlements
from tidegate_policy.steer import guards, steer_memory, steering_loop

MEASURED = ("sloAttainment", "alpha", "errorBudgetLeft")
"""Fields of the status, its node pools and its classes that are absent while there is no measurement."""
KEPT = ("activePolicy", "steering")
"""Fields that stay while there is nothing to steer: what a successor goes on with."""

_REASONS = {
    guards.Kind.SWITCH: "PolicySwitched",
    guards.Kind.ROLLBACK: "PolicyRolledBack",
    guards.Kind.BYPASS: "PolicyBypassed",
    guards.Kind.OVERRIDE: "PolicyOverridden",
}
NO_ENGINES = "NoEngines"
MOST_REASON, MOST_PART = 400, 200
"""Characters of the reason in the event of a switch, and of each other part. Kubernetes takes 1,024 in all."""
SHOWN_PARTS = 5
"""Engines and gateways that a condition names."""


def of_steering(
    before: Json,
    pool: spec.Pool,
    outcome: steering_loop.Outcome,
    settings: guards.GuardSettings,
    alpha: float | None,
    node_pool_of: Mapping[str, str],
    now: datetime.datetime,
    *,
    trouble: pool_status.Condition | None = None,
    store: pool_status.Condition | None = None,
) -> dict[str, Any]:
    """The part of the status that steering writes: always complete, as server-side apply requires. `trouble` is the
    condition of a pool whose engines cannot be steered, and `store` that of its store; None = as before."""
    state = outcome.state
    stated: dict[str, Any] = {
        "activePolicy": {
            "name": state.active,
            "since": reconcile.timestamp_of(state.since_at_s),
            "reason": steering_driver.explained(outcome),
            "override": state.kind is guards.Kind.OVERRIDE,
        },
        "steering": steer_memory.written(state),
        "conditions": pool_status.timed(
            [
                trouble or _stability(outcome, settings, now.timestamp()),
                credibility(outcome.outliers),
                store or store_status.carried(before),
            ],
            before.get("conditions", ()),
            generation=pool.generation,
            now=reconcile.timestamp(now),
        ),
    }
    if outcome.window is None:  # between two decisions the measurements stay
        # An earlier version of the operator wrote floats.
        kept = {
            item["name"]: _decimal(float(item["sloAttainment"]))
            for item in before.get("nodePools", ())
            if "sloAttainment" in item
        }
        total = _decimal(float(before["sloAttainment"])) if "sloAttainment" in before else None
    else:
        kept = _attainments(outcome.window, node_pool_of)
        total = _attainment(outcome.window.values())
    names = {node_pool.name for node_pool in pool.node_pools}
    stated["nodePools"] = [{"name": name, "sloAttainment": kept[name]} for name in sorted(kept) if name in names]
    measured = {"sloAttainment": total, "alpha": None if alpha is None else _decimal(alpha)}
    return stated | {key: value for key, value in measured.items() if value is not None}


def without_engines(before: Json, kept: Json, *, generation: int, now: datetime.datetime) -> dict[str, Any]:
    """The part of the status of a pool without a ready engine: no policy is in force there, and nothing is measured.
    `kept` has the fields `KEPT` as they were stated last."""
    named = kept.get("activePolicy", {}).get("name")
    message = "No engine is ready, so no policy is in force."
    if named:
        message += f" The next engine gets {named}, or what is decided then."
    stated = [
        pool_status.Condition(type="PolicyStable", status=False, reason=NO_ENGINES, message=message),
        pool_status.Condition(type="ReportsCredible", status=None, reason=NO_ENGINES, message="No engine is ready."),
        store_status.NOT_ASKED,
    ]
    return _unsteered(stated, before, kept, generation=generation, now=now)


def with_invalid_spec(before: Json, kept: Json, *, generation: int, now: datetime.datetime) -> dict[str, Any]:
    """The part of the status of a pool whose spec cannot be built: its engines keep their policy, and nothing is measured.
    `kept` has the fields `KEPT` as they were stated last."""
    stated = [
        pool_status.invalid_spec("PolicyStable", "The engines keep their policy, and nothing is decided."),
        pool_status.invalid_spec("ReportsCredible", "The steering loop reads no reports."),
        pool_status.invalid_spec(store_status.CONDITION, "The gateways are not asked for the store."),
    ]
    return _unsteered(stated, before, kept, generation=generation, now=now)


def _unsteered(
    stated: Sequence[pool_status.Condition], before: Json, kept: Json, *, generation: int, now: datetime.datetime
) -> dict[str, Any]:
    previous = before.get("conditions", ())
    return {
        **kept,
        "conditions": pool_status.timed(stated, previous, generation=generation, now=reconcile.timestamp(now)),
        "nodePools": [],
        "classes": [],
    }


def classes(before: Json, pool: spec.Pool, budgets: error_budget.ErrorBudgets | None) -> list[dict[str, Any]]:
    """The classes of the spec in the status. Between two decisions, with `budgets` of None, the measurements stay."""
    objectives = {item["name"]: item.get("objective", entitlements.OBJECTIVE) for item in pool.classes}
    if budgets is None:
        return [dict(item) for item in before.get("classes", ()) if item["name"] in objectives]
    return [
        {
            "name": name,
            "objective": f"{objective:g}",
            "window": error_budget.WINDOW,
            "sloAttainment": _decimal(seen.attainment),
            "errorBudgetLeft": _decimal(seen.left),
        }
        for name, objective in sorted(objectives.items())
        if (seen := budgets.of_class(name, objective)) is not None
    ]


def _attainments(window: Mapping[str, qos.Qos], node_pool_of: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str | None] = {
        name: _attainment(report for address, report in window.items() if node_pool_of.get(address) == name)
        for name in set(node_pool_of.values())
    }
    return {name: value for name, value in found.items() if value is not None}


def _attainment(reports: Any) -> str | None:
    """Share of the calls with a target that met it; None when there were none."""
    together = qos.across(reports)
    return _decimal(1 - together.miss_ratio) if together.with_target else None


def _decimal(value: float) -> str:
    """A number as the status has it: fields of the API are no floats."""
    return f"{round(value, 4):g}"


def rejection(rejections: Mapping[str, str], secret: str) -> pool_status.Condition | None:
    """The condition of a pool of which an engine rejects the token."""
    if not rejections:
        return None
    address = min(rejections)
    count = "1 engine rejects" if len(rejections) == 1 else f"{len(rejections)} engines reject"
    message = (
        f"{count} the token in the Secret {secret}, for example {address}: {rejections[address]}. "
        "Such an engine serves by the policy that it has, and reads its token when it starts."
    )
    return pool_status.Condition(type="PolicyStable", status=False, reason="TokenRejected", message=message)


def silence(silent: Collection[str], node_pool_of: Mapping[str, str]) -> pool_status.Condition | None:
    """The condition of a pool of which no engine reports; None for any other pool."""
    if not node_pool_of or not set(node_pool_of) <= set(silent):
        return None
    count = len(node_pool_of)
    message = f"None of the {count} ready engines reports, so the policy that they serve by is unknown."
    return pool_status.Condition(type="PolicyStable", status=False, reason="EnginesSilent", message=message)


def disobedience(policy: str, engines: Mapping[str, str], gateways: Mapping[str, str]) -> pool_status.Condition | None:
    """The condition of a pool of which some parts may not serve by `policy`: engines with the reason, and gateways with the
    policy that they have."""
    parts = [
        *(f"engine {address}: {engines[address]}" for address in sorted(engines)),
        *(f"gateway {address} has {gateways[address]}" for address in sorted(gateways)),
    ]
    if not parts:
        return None
    more = f"; and {len(parts) - SHOWN_PARTS} more" if len(parts) > SHOWN_PARTS else ""
    message = f"Not all parts serve by {policy}: {'; '.join(parts[:SHOWN_PARTS])}{more}."
    return pool_status.Condition(type="PolicyStable", status=False, reason="NotFollowed", message=message)


def credibility(outliers: Mapping[str, str]) -> pool_status.Condition:
    """Whether the reports of all engines count in full. `outliers` has the engines whose reports do not, and why."""
    if not outliers:
        return pool_status.Condition(
            type="ReportsCredible", status=True, reason="Believed", message="The reports of all engines count in full."
        )
    shown = [f"{address}: {outliers[address]}" for address in sorted(outliers)[:SHOWN_PARTS]]
    more = f"; and {len(outliers) - SHOWN_PARTS} more" if len(outliers) > SHOWN_PARTS else ""
    message = f"The steering loop counts less than these engines claim: {'; '.join(shown)}{more}."
    return pool_status.Condition(type="ReportsCredible", status=False, reason="Outliers", message=message)


def _stability(outcome: steering_loop.Outcome, settings: guards.GuardSettings, now: float) -> pool_status.Condition:
    state = outcome.state
    age_s, shown = now - state.since_at_s, f"{state.active}: {steering_driver.explained(outcome)}"
    if state.kind is guards.Kind.BYPASS:
        return pool_status.Condition(type="PolicyStable", status=False, reason="Bypass", message=shown)
    if age_s < guards.minimum_dwell_s(state, settings) and state.kind is not guards.Kind.OVERRIDE:
        return pool_status.Condition(type="PolicyStable", status=False, reason="Switched", message=shown)
    return pool_status.Condition(type="PolicyStable", status=True, reason="Settled", message=shown)


def events(pool: spec.Pool, outcome: steering_loop.Outcome, now: datetime.datetime) -> Sequence[pool_status.Event]:
    """The event of a switch, or of the effect of the last switch when it is known since this observation."""
    kind, verdict, state = outcome.verdict.kind, outcome.verdict, outcome.state
    if kind is not guards.Kind.KEEP:
        since = datetime.datetime.fromtimestamp(state.since_at_s, datetime.UTC)
        message = f"Engines now serve by {verdict.policy}: {steering_driver.bounded(verdict.reason, MOST_REASON)}"
        if state.expected:
            message += f". Expected: {steering_driver.bounded(state.expected, MOST_PART)}"
        if state.alternatives:
            message += f". Alternatives: {steering_driver.bounded(', '.join(state.alternatives), MOST_PART)}"
        warning = kind in (guards.Kind.ROLLBACK, guards.Kind.BYPASS)
        return [_event(pool, _REASONS[kind], message, since, warning=warning)]
    if outcome.judged is None:
        return []
    message = f"After the switch to {state.active}: {steering_driver.bounded(state.effect, MOST_PART)}"
    if state.expected:
        message += f". Expected: {steering_driver.bounded(state.expected, MOST_PART)}"
    return [_event(pool, "PolicyEffect", message, now)]


def _event(
    pool: spec.Pool, reason: str, message: str, at: datetime.datetime, *, warning: bool = False
) -> pool_status.Event:
    return pool_status.Event(
        namespace=pool.namespace,
        pool=pool.name,
        uid=pool.uid,
        reason=reason,
        message=message,
        at=reconcile.timestamp(at),
        warning=warning,
    )
