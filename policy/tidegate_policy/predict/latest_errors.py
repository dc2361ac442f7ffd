"""The latest errors of a prediction, in the order of their size: for means and quantiles."""

import bisect
from collections import deque
from statistics import fmean


class LatestErrors:
    """At most `most` errors; the oldest one is forgotten first."""

    __slots__ = ("_latest", "_most", "ordered")

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: deque[float] = deque()
        self.ordered: list[float] = []
        """The errors from the smallest to the largest; to be read only."""

    def add(self, error: float) -> None:
        """One more error."""
        self._latest.append(error)
        bisect.insort(self.ordered, error)
        if len(self._latest) > self._most:
            del self.ordered[bisect.bisect_left(self.ordered, self._latest.popleft())]

    @property
    def mean(self) -> float:
        """Their mean; 0 without errors."""
        return fmean(self._latest) if self._latest else 0.0

    @property
    def p95(self) -> float:
        """Their 95th percentile; 0 without errors."""
        return self.ordered[int(0.95 * (len(self.ordered) - 1))] if self.ordered else 0.0
