"""The part of a pool's status that the canary writes, the memory in it, and the events of its steps. Pure."""

import datetime
from typing import Any

from tidegate_operator import canary_hold, pool_status, reconcile, spec
from tidegate_operator.spec import Json
from tidegate_policy.rollout import canary

WRITTEN = ("rollout",)
"""Fields of the status that are written here, and removed when they are no longer stated."""
IN_TEST = (canary.Phase.STARTING, canary.Phase.TESTING)
EVENTS = {
    canary.Phase.STARTING: "CanaryStopped",
    canary.Phase.TESTING: "CanaryStep",
    canary.Phase.PROMOTED: "CanaryPromoted",
}
"""Reasons of the events. A failed canary has the event `RolledBack`, once its Deployment goes back."""


def of_canary(tested: canary_hold.Tested, state: canary.CanaryState, weight: int | None) -> dict[str, Any]:
    """The part of the status, always complete, as server-side apply requires. `weight` is the share that is in force."""
    return {
        "rollout": {
            "nodePool": tested.node_pool,
            "revision": state.revision,
            "phase": state.phase.value,
            "step": state.step + 1,
            **({"stops": state.stops} if state.stops and state.phase in IN_TEST else {}),
            **({} if weight is None else {"weight": weight}),
            "since": reconcile.timestamp_of(state.since_s),
            "reason": state.reason,
        }
    }


def remembered(body: Json, tested: canary_hold.Tested, now: float) -> canary.CanaryState | None:
    """The state of the revision that an earlier operator left in the status; None if there is none. An instant after `now`,
    which another clock leaves, counts as `now`."""
    stated = body.get("status", {}).get("rollout", {})
    try:
        if (stated["nodePool"], stated["revision"]) != (tested.node_pool, tested.revision):
            return None
        return canary.CanaryState(
            revision=tested.revision,
            phase=canary.Phase(stated["phase"]),
            step=int(stated["step"]) - 1,
            since_s=min(datetime.datetime.fromisoformat(stated["since"]).timestamp(), now),
            reason=str(stated["reason"]),
            stops=int(stated.get("stops", 0)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def event(pool: spec.Pool, tested: canary_hold.Tested, state: canary.CanaryState) -> pool_status.Event | None:
    """The event of a state that was just entered; None if another one tells of it."""
    if state.phase not in EVENTS:
        return None
    return pool_status.Event(
        namespace=pool.namespace,
        pool=pool.name,
        uid=pool.uid,
        reason=EVENTS[state.phase],
        message=f"{tested.node_pool}, revision {state.revision}: {state.reason}",
        at=reconcile.timestamp_of(state.since_s),
        warning=state.phase is canary.Phase.STARTING,
    )
