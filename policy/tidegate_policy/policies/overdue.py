"""The waiting calls or groups whose patience has ended, found without a search.

Policies that order by size or level starve large and low calls. They lift a waiting member whose patience has ended
before the others. Each event carries the present instant, so no timer is needed.
"""

import heapq
import math
from collections.abc import Mapping

LIFTS_PER_EVENT = 32
"""Members that one event lifts at most, so that no event is long. The members that became overdue first come first."""
FEW = 8
"""Members that are pushed one by one; more are merged with the heap at once."""
_SLACK = 64


class Overdue:
    """Members with the instants at which their patience ends."""

    def __init__(self) -> None:
        self.first_at_s = math.inf
        """No patience ends before this instant."""
        self._ends: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def watch(self, member: str, ends_at_s: float) -> None:
        """The patience of `member` ends at this instant; an earlier instant of the member no longer counts."""
        self._ends[member] = ends_at_s
        if ends_at_s < self.first_at_s:
            self.first_at_s = ends_at_s
        heapq.heappush(self._heap, (ends_at_s, member))
        if len(self._heap) > 2 * len(self._ends) + _SLACK:
            self._heap = [(ends_at_s, member) for member, ends_at_s in self._ends.items()]
            heapq.heapify(self._heap)

    def watch_all(self, ends: Mapping[str, float]) -> None:
        """`watch` for many members."""
        if len(ends) <= FEW:
            for member, ends_at_s in ends.items():
                self.watch(member, ends_at_s)
            return
        self._ends.update(ends)
        self._heap += zip(ends.values(), ends, strict=True)
        heapq.heapify(self._heap)
        self.first_at_s = self._heap[0][0]

    def forget(self, member: str) -> None:
        """The member is no longer watched, if it was."""
        self._ends.pop(member, None)

    def take(self, now: float) -> list[str]:
        """The members whose patience has ended, longest overdue first, at most `LIFTS_PER_EVENT`. They are forgotten."""
        taken: list[str] = []
        while self._heap and self._heap[0][0] <= now and len(taken) < LIFTS_PER_EVENT:
            ends_at_s, member = heapq.heappop(self._heap)
            if self._ends.get(member) == ends_at_s:
                del self._ends[member]
                taken.append(member)
        self.first_at_s = self._heap[0][0] if self._heap else math.inf
        return taken
