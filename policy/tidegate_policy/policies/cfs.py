"""`cfs`: completely fair scheduling between tenants, by the work that they really received.

The virtual runtime of a tenant is its work over its weight, counted in granules as the engine computes it, and the tenant
with the smallest goes first. A start is charged one granule in advance, so that free places are shared out before any
token is computed. It needs no prediction. It is `stride` with a fine quantum, and both are here because H-MAS names both.
"""

from tidegate_policy.policies.policy_contract import Parameter, SchedulerContext
from tidegate_policy.policies.tenant_accounts import TagTurns, TenantPolicy


class Cfs(TenantPolicy):
    """The tag of an account is the virtual runtime."""

    name = "cfs"
    PARAMETERS = (
        Parameter(
            name="granularity_s",
            default=0.01,
            low=0.0001,
            high=60.0,
            unit="seconds",
            meaning="Work is charged in units of this size; a start is charged one unit in advance.",
        ),
    )

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._granularity_s = self.parameters["granularity_s"]
        self.turns = TagTurns(self)

    def price(self, lane: int) -> float:
        return self._granularity_s

    def unit(self, price_s: float) -> float:
        return price_s
