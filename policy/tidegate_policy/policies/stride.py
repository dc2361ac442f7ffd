"""`stride`: shares by weight in whole quanta of work (Waldspurger and Weihl 1995).

Each tenant has a pass. The tenant with the smallest pass goes first, and each quantum of work that its calls receive
advances its pass by its stride, one over its weight. The last quantum of a call counts in part. It needs no prediction.
"""

from tidegate_policy.policies.policy_contract import Parameter, SchedulerContext
from tidegate_policy.policies.tenant_accounts import TagTurns, TenantPolicy


class Stride(TenantPolicy):
    """The tag of an account is the pass."""

    name = "stride"
    PARAMETERS = (
        Parameter(
            name="quantum_s",
            default=0.05,
            low=0.001,
            high=60.0,
            unit="seconds",
            meaning="Work is charged in units of this size; a start is charged one unit in advance.",
        ),
    )

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._quantum_s = self.parameters["quantum_s"]
        self.turns = TagTurns(self)

    def price(self, lane: int) -> float:
        return self._quantum_s

    def unit(self, price_s: float) -> float:
        return price_s
