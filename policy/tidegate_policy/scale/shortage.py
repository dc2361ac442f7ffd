"""For how many engines of a node pool does the cluster have room, and when is it asked for more again?"""

from dataclasses import dataclass

FIRST_RETRY_S, LONGEST_RETRY_S = 600.0, 3600.0
"""Time until a node pool without room is tried again, doubled each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The cluster has no room for more engines of a node pool."""

    most: int
    until_s: float
    retry_s: float
    """Time of the present wait."""


def found(now: float, before: Shortage | None, most: int) -> Shortage:
    """The cluster has room for `most` engines of a node pool. `before` is what was known of it."""
    if before is not None and now < before.until_s:
        return before  # the pods of the engines that are not wanted any more may still exist
    retry_s = FIRST_RETRY_S if before is None else min(2 * before.retry_s, LONGEST_RETRY_S)
    return Shortage(most=most, until_s=now + retry_s, retry_s=retry_s)
