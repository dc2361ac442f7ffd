"""`edf`: the earliest deadline goes first. It is right while the load is feasible; under overload misses cascade."""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Edf(StaticPolicy):
    """The key is the instant at which the call is due. A call without a deadline ages (`model.PATIENCE_S`)."""

    name = "edf"

    def key(self, item: QueuedRequest) -> Key:
        return (item.call.due_or_patience_at_s,)
