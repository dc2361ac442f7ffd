"""What saturates a pool? Means by which Little's law tells it.

A pool that completes one unit of work (a call, a workflow) in `demand_s` seconds, when its engines batch as much as they
may, is saturated by `alone_s / demand_s` units at the same time whose latency alone is `alone_s` seconds.
"""

from dataclasses import dataclass

NEWEST_WEIGHT = 0.02
"""Weight of the newest unit in the means, once many have ended."""


@dataclass(slots=True)
class Means:
    """What the units that have ended have shown."""

    count: int = 0
    alone_s: float = 0.0
    demand_s: float = 0.0

    @property
    def places(self) -> float | None:
        """Units that saturate the pool at the same time; None while no unit is known that takes time."""
        return self.alone_s / self.demand_s if self.demand_s > 0.0 else None

    def observe(self, alone_s: float, demand_s: float) -> None:
        """A unit has ended that takes `alone_s` seconds alone, and `demand_s` of the whole pool."""
        self.count += 1
        weight = max(NEWEST_WEIGHT, 1 / self.count)
        self.alone_s += weight * (alone_s - self.alone_s)
        self.demand_s += weight * (demand_s - self.demand_s)
