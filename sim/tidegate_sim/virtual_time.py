"""Virtual time: a heap of events, and a clock that jumps from one to the next.

Nothing here sleeps. Events at the same instant run in the order in which they were added, so a run depends only on its
inputs.
"""

import heapq
import itertools
from collections.abc import Callable

Event = Callable[[], None]


class Loop:
    """The clock and the events to come."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Event]] = []
        self._asked = itertools.count()

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def after(self, delay_s: float, event: Event) -> None:
        """Runs `event` once `delay_s` virtual seconds have passed. Raises `ValueError` for a negative delay."""
        if delay_s < 0:
            raise ValueError(f"an event cannot be {-delay_s} s in the past")
        heapq.heappush(self._due, (self._now_s + delay_s, next(self._asked), event))

    def run(self) -> None:
        """Runs until no event is left."""
        while self._due:
            self.run_next()

    def run_next(self) -> None:
        """Runs the next event."""
        self._now_s, _, event = heapq.heappop(self._due)
        event()
