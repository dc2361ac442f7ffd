"""Does the store answer the gateways? The condition StoreReachable, from the states of the gateways.

Pure. Only gateways know a store that the spec names by its address (`state.valkey.url`), and only they see that an embedded
one refuses their password. Steering asks them and writes the condition; `pool_status` reads it for Available and Degraded.
"""

import dataclasses
from collections.abc import Mapping

from tidegate_operator import pool_status
from tidegate_operator.spec import Json

CONDITION = pool_status.STORE
UNKNOWN = pool_status.Condition(
    type=CONDITION, status=None, reason="NotReported", message="No gateway tells whether it reaches the store."
)
NOT_ASKED = dataclasses.replace(
    UNKNOWN, message="No engine is ready, so the operator does not ask the gateways for the store."
)


def parse(state: Json) -> bool | None:
    """Whether a gateway reaches the store, from the answer of GET /admin/state; None if the state does not tell."""
    store = state.get("store")
    reaches = store.get("reachable") if isinstance(store, dict) else None
    return reaches if isinstance(reaches, bool) else None


def condition(seen: Mapping[str, bool | None]) -> pool_status.Condition:
    """The condition of a pool. `seen`: by gateway, whether it reaches the store."""
    known = {address: reaches for address, reaches in seen.items() if reaches is not None}
    failing = sorted(address for address, reaches in known.items() if not reaches)
    if not known:
        return UNKNOWN
    if not failing:
        message = "The gateways reach the store."
        return pool_status.Condition(type=CONDITION, status=True, reason="Reachable", message=message)
    effect = "they serve single calls and shed workflows"
    if len(failing) == len(known):
        message = f"The store does not answer the gateways: {effect}."
        return pool_status.Condition(type=CONDITION, status=False, reason=pool_status.UNREACHABLE, message=message)
    message = f"The store does not answer {len(failing)} of {len(known)} gateways, for example {failing[0]}: {effect}."
    return pool_status.Condition(type=CONDITION, status=False, reason="PartlyReachable", message=message)


def carried(before: Json) -> pool_status.Condition:
    """The condition as it stands in a status."""
    for item in before.get("conditions", ()):
        if item["type"] == CONDITION and item["status"] != "Unknown":
            return pool_status.Condition(
                type=CONDITION, status=item["status"] == "True", reason=item["reason"], message=item["message"]
            )
    return UNKNOWN
