"""`wfq`: weighted fair queueing between tenants, by predicted work (start-time fair queueing, Goyal 1996).

The tenant with the least work charged for its weight goes first. A start is charged the mean work of its tenant, then the
predicted work of the call, and in the end the work that the call really received. `cfs` charges work only as it happens.
"""

from tidegate_policy.policies.policy_contract import QueuedRequest, SchedulerContext
from tidegate_policy.policies.tenant_accounts import TagTurns, TenantPolicy


class Wfq(TenantPolicy):
    """A start is charged in advance all the work that is expected of it."""

    name = "wfq"

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self.turns = TagTurns(self)

    def floor(self, item: QueuedRequest, price_s: float) -> float:
        return self.work_s(item)
