"""Which margin above a predicted length do few answers exceed? Learned for each tenant and model.

The errors of a tenant's predictions say nothing about those of another one, so only its own errors count for it. A tenant
with too few errors of a length gets the median over the margins of the tenants of the model, in which each counts once. It
has none while fewer than `LEAST_TENANTS` tenants have one: one tenant with odd answers is no rule for others.
"""

from dataclasses import dataclass

from tidegate_policy.predict import conformal_bound, latest_errors, tenant_median
from tidegate_policy.tenant_memory import TenantMemory

RISK = 0.05
"""The share of calls that may exceed the bound."""
LEAST_ERRORS = 20
"""Errors of a tenant's bucket before it has a margin: with fewer the largest one would be exceeded too often."""
LEAST_TENANTS = 3
"""Tenants with a margin before others get their median."""
MAX_BUCKETS = 2048
"""Buckets of all tenants that are remembered, each with at most `conformal_bound.KEPT` errors."""

Bucket = tuple[str, int]
"""(model, `bit_length` of the prediction)."""


@dataclass(slots=True)
class _Errors:
    """The errors of one tenant's predictions."""

    latest: latest_errors.LatestErrors
    margin: float | None = None
    """None = they are too few."""


class TenantBounds:
    """The margins of all tenants. All methods take constant time."""

    def __init__(self) -> None:
        self._errors: TenantMemory[Bucket, _Errors] = TenantMemory(MAX_BUCKETS)
        self._shared: dict[Bucket, tenant_median.TenantMedian] = {}
        """The margins of the tenants that have one."""

    def margin(self, tenant: str, model: str, predicted: int) -> float | None:
        """The tokens by which the upper bound of a call with this prediction exceeds it; None = not known."""
        bucket = (model, predicted.bit_length())
        own = self._errors.get(tenant, bucket)
        if own is not None and own.margin is not None:
            return own.margin
        shared = self._shared.get(bucket)
        return None if shared is None or len(shared) < LEAST_TENANTS else shared.middle

    def observe(self, tenant: str, model: str, predicted: int, actual: int) -> None:
        """A call of the tenant with this prediction had this output length."""
        bucket = (model, predicted.bit_length())
        own = self._errors.get(tenant, bucket)
        if own is None:
            own = _Errors(latest_errors.LatestErrors(conformal_bound.KEPT))
        own.latest.add(actual - predicted)
        if len(own.latest.ordered) >= LEAST_ERRORS:
            margin = conformal_bound.quantile(own.latest, RISK)
            shared = self._shared.get(bucket)
            if shared is None:
                shared = self._shared[bucket] = tenant_median.TenantMedian()
            shared.change(own.margin, margin)
            own.margin = margin
        gone = self._errors.put(tenant, bucket, own)
        if gone is not None and gone[2].margin is not None:
            shared = self._shared[gone[1]]
            shared.change(gone[2].margin, None)
            if not len(shared):
                del self._shared[gone[1]]
