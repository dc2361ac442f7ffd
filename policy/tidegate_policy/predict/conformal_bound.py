"""An upper bound of a call's output length that holds with a chosen probability: bucketed conformal calibration.

`l_upper = l_predicted + q_(1-eps)(D_bucket)` (H-MAS eq 4, 10): each bucket of sizes keeps the latest prediction errors, and
the bound adds their quantile to the prediction. A bucket holds the sizes between two powers of two. Engines take the prompt
for the size, and gateways the prediction, for each tenant (`tenant_bounds`, docs/prediction.md).
"""

import math
from dataclasses import dataclass, field

from tidegate_policy.predict import latest_errors

KEPT = 512
"""Errors that a bucket remembers."""


@dataclass(slots=True, kw_only=True)
class ConformalBound:
    """The error buffers."""

    risk: float = 0.05
    """The share of calls that may exceed the bound (the paper's eps)."""
    _buckets: dict[int, latest_errors.LatestErrors] = field(default_factory=dict)

    def observe(self, size: int, predicted: int, actual: int) -> None:
        """A call with this prediction had this output length."""
        bucket = self._buckets.get(size.bit_length())
        if bucket is None:
            bucket = self._buckets[size.bit_length()] = latest_errors.LatestErrors(KEPT)
        bucket.add(actual - predicted)

    def seen(self, size: int) -> int:
        """Errors that are known for calls of this size."""
        bucket = self._buckets.get(size.bit_length())
        return 0 if bucket is None else len(bucket.ordered)

    def upper(self, size: int, predicted: int) -> int:
        """The bound for a call with this prediction; at least the prediction's own value while errors are unknown.

        The quantile is the conformal one, `ceil((n + 1)(1 - eps))` of n errors, so the bound holds for finite n; with too
        few errors for it, the largest error counts."""
        return max(predicted + self.margin(size), 1)

    def margin(self, size: int) -> int:
        """The tokens by which the bound of a call of this size exceeds its prediction. Sizes of one `bit_length` have the
        same margin."""
        bucket = self._buckets.get(size.bit_length())
        if bucket is None:
            return 0
        return int(quantile(bucket, self.risk))


def quantile(errors: latest_errors.LatestErrors, risk: float) -> float:
    """The error that at most about this share of further ones exceeds. There is at least one error."""
    count = len(errors.ordered)
    return errors.ordered[min(math.ceil((count + 1) * (1 - risk)), count) - 1]
