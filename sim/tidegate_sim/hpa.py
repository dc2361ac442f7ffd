"""The algorithm of Kubernetes' HorizontalPodAutoscaler, with the defaults of its controller (autoscaling/v2).

Every 15 s: the ratio of the metric to its target, no change within a tolerance of 10%, else the number of pods times the
ratio, rounded up. Pods without a metric, which are not ready, count as 0 on the way up and as the target on the way down.
In 15 s the number at most doubles or grows by four, whichever is more. On the way down the greatest recommendation of the
last 300 s counts.
"""

import math
from collections.abc import Sequence

SYNC_S = 15.0
TOLERANCE = 0.1
DOWN_STABILISATION_S = 300.0
MOST_ADDED, MOST_TIMES = 4, 2
"""The default policies of `behavior.scaleUp`, of which the greater counts."""


class Hpa:
    """The controller of one Deployment."""

    def __init__(self, *, low: int, high: int) -> None:
        self._low = max(low, 1)
        self._high = high
        self._recommended: list[tuple[float, int]] = []

    def by_pods(self, now: float, values: Sequence[float], missing: int, target: float) -> int:
        """The number of pods, from a metric of each ready pod whose mean should be `target`. `missing` pods are not
        ready."""
        current = len(values) + missing
        if not values or not current:
            return self._bounded(now, current, current)
        ratio = sum(values) / len(values) / target
        if abs(ratio - 1) <= TOLERANCE:
            return self._bounded(now, current, current)
        if missing:
            filled = 0.0 if ratio > 1 else target * missing
            with_missing = (sum(values) + filled) / current / target
            if abs(with_missing - 1) <= TOLERANCE or (with_missing > 1) != (ratio > 1):
                return self._bounded(now, current, current)
            ratio = with_missing
        wanted = math.ceil(ratio * current - 1e-9)
        if (ratio > 1 and wanted < current) or (ratio < 1 and wanted > current):
            wanted = current
        return self._bounded(now, current, wanted)

    def by_total(self, now: float, total: float, current: int, target: float) -> int:
        """The number of pods, from an external metric with a target of the type AverageValue."""
        if current and abs(total / (target * current) - 1) <= TOLERANCE:
            return self._bounded(now, current, current)
        return self._bounded(now, current, math.ceil(total / target - 1e-9))

    def _bounded(self, now: float, current: int, wanted: int) -> int:
        kept = [each for each in self._recommended if each[0] > now - DOWN_STABILISATION_S]
        self._recommended = [*kept, (now, wanted)]
        if wanted < current:
            wanted = min(max(count for _, count in self._recommended), current)
        most = max(current + MOST_ADDED, current * MOST_TIMES)
        return min(max(min(wanted, most), self._low), self._high)
