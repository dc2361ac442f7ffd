"""What have the gateways of a pool counted since they were last asked?

Pure. A gateway counts from its start. The first counts of a gateway are the base of the next ones, and those of a gateway
that is no longer ready are forgotten.
"""

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

C = TypeVar("C")


class LatestCounts(Generic[C]):
    """The latest counts of each gateway of a pool."""

    def __init__(self) -> None:
        self._last: dict[str, C] = {}

    def add(self, seen: Mapping[str, C], *, gateways: Collection[str]) -> list[tuple[C, C]]:
        """Takes in what gateways report, by address; returns (before, now) of each that has reported before. `gateways` are
        all that are ready."""
        pairs = [(self._last[gateway], counts) for gateway, counts in seen.items() if gateway in self._last]
        self._last = {gateway: counts for gateway, counts in {**self._last, **seen}.items() if gateway in gateways}
        return pairs
