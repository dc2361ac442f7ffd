"""The part of a pool's status that autoscaling writes: the wanted engines, why, the changes of the last hour, and the
condition Autoscaling; and the events of its changes. Pure."""

import datetime
from collections.abc import Collection, Mapping
from typing import Any

from tidegate_operator import pool_status, reconcile, spec
from tidegate_operator.spec import Json
from tidegate_policy.scale import autoscaler

WRITTEN = ("wanted", "scaling", "autoscaling")
"""Fields of the status and its node pools that are written here, and removed when they are no longer stated."""
CONDITION = pool_status.AUTOSCALING


def of_decision(
    before: Json,
    pool: spec.Pool,
    state: autoscaler.ScaleState,
    bounds: Mapping[str, str],
    taken: Mapping[str, str],
    now: datetime.datetime,
    *,
    trouble: pool_status.Condition | None = None,
) -> dict[str, Any]:
    """The part of the status, always complete, as server-side apply requires. `bounds` are those of the decision. `taken`:
    by node pool, the other autoscaler that scales it. `trouble` is the condition of a pool that cannot be scaled; it is not
    told where others scale all node pools."""
    decides = any(each.autoscaled and each.name not in taken for each in pool.node_pools)
    condition = (
        (trouble if decides else None)
        or _conflict(taken)
        or pool_status.Condition(type=CONDITION, status=True, reason="Scaling", message=state.reason)
    )
    return {
        "autoscaling": {
            "reason": state.reason,
            "since": reconcile.timestamp_of(state.since_s),
            "changes": [reconcile.timestamp_of(at_s) for at_s in state.changed_at_s],
        },
        "nodePools": [
            {
                "name": each.name,
                "wanted": state.wanted[each.name],
                **({"scaling": bounds[each.name]} if bounds.get(each.name) else {}),
            }
            for each in sorted(pool.node_pools, key=lambda each: each.name)
            if each.autoscaled and each.name not in taken and each.name in state.wanted
        ],
        "conditions": pool_status.timed(
            [condition], before.get("conditions", ()), generation=pool.generation, now=reconcile.timestamp(now)
        ),
    }


def decided(status: Json) -> Json:
    """The last decision in a status; empty without one."""
    if "autoscaling" not in status:
        return {}
    node_pools = [
        {key: item[key] for key in ("name", "wanted", "scaling") if key in item}
        for item in status.get("nodePools", ())
        if "wanted" in item
    ]
    return {"autoscaling": status["autoscaling"], "nodePools": node_pools}


def with_invalid_spec(before: Json, stated: Json, *, generation: int, now: datetime.datetime) -> dict[str, Any]:
    """The part of the status of a pool whose spec cannot be built: the last decision stays. `stated` is this part as it was
    stated last."""
    condition = pool_status.invalid_spec(CONDITION, "The number of engines stays as it is.")
    previous = before.get("conditions", ())
    timed = pool_status.timed([condition], previous, generation=generation, now=reconcile.timestamp(now))
    return {**stated, "conditions": timed}


def remembered(body: Json, wanted: Mapping[str, int], now: float) -> autoscaler.ScaleState:
    """The state that an earlier operator left in the status; `wanted` are the engines of each node pool."""
    before = body.get("status", {}).get("autoscaling", {})
    state = autoscaler.begin(now, wanted)
    try:
        changes = tuple(_seconds(text) for text in before["changes"])
        since_s = min(_seconds(before["since"]), now)  # another clock may have left an instant in the future
        return autoscaler.resumed(state, reason=str(before["reason"]), since_s=since_s, changes=changes)
    except (KeyError, TypeError, ValueError):
        return state


def unschedulable(sentences: Mapping[str, str]) -> pool_status.Condition | None:
    """The condition of a pool of which node pools want engines for which the cluster has, or lately had, no room.
    `sentences`: by node pool, what the scheduler or the quota says of one of them."""
    if not sentences:
        return None
    parts = [f"{name}: {sentence}" for name, sentence in sorted(sentences.items())]
    message = f"The cluster takes no further engines of these node pools: {'; '.join(parts)}. "
    message += (
        "Others take over where the pool has them, and without any one engine waits for room. Add nodes, raise the quota, "
        "correct accelerator, nodeSelector, tolerations or resources, or lower maxReplicas."
    )
    return pool_status.Condition(type=CONDITION, status=False, reason=pool_status.UNSCHEDULABLE, message=message)


def silence() -> pool_status.Condition:
    """The condition of a pool whose gateways do not report."""
    message = "No gateway reports its load, so the number of engines stays as it is."
    return pool_status.Condition(type=CONDITION, status=False, reason=pool_status.SILENT, message=message)


def partial_silence(answered: Collection[str], gateways: Collection[str]) -> pool_status.Condition | None:
    """The condition of a pool of whose `gateways` some have not `answered`; None if all have."""
    silent = sorted(set(gateways) - set(answered))
    if not silent:
        return None
    message = (
        f"{len(silent)} of {len(gateways)} gateways report no load, for example {silent[0]}. "
        "So engines may come, and none goes."
    )
    return pool_status.Condition(type=CONDITION, status=False, reason="GatewaysPartlySilent", message=message)


def event(pool: spec.Pool, state: autoscaler.ScaleState, before: Mapping[str, int]) -> pool_status.Event:
    """The event of a change."""
    changes = [
        f"{name} from {before.get(name, 0)} to {count}"
        for name, count in sorted(state.wanted.items())
        if before.get(name, 0) != count
    ]
    return pool_status.Event(
        namespace=pool.namespace,
        pool=pool.name,
        uid=pool.uid,
        reason="Scaled",
        message=f"{', '.join(changes)}: {state.reason}",
        at=reconcile.timestamp_of(state.since_s),
    )


def _conflict(taken: Mapping[str, str]) -> pool_status.Condition | None:
    if not taken:
        return None
    parts = [f"{name} by {scaler}" for name, scaler in sorted(taken.items())]
    message = (
        f"Another autoscaler scales these node pools, and keeps them: {', '.join(parts)}. "
        "Delete it, or set scaledBy: external (for a Deployment) or scaledBy: pool (for the ServingPool)."
    )
    return pool_status.Condition(type=CONDITION, status=False, reason="ScaledByAnother", message=message)


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
