"""Earliest deadline first: right while the load is feasible, prone to cascades of misses when it is not."""

from tidegate_policy.policies.policy_contract import Key, OneLane, QueuedRequest


class Edf(OneLane):
    """By the instant at which the call is due; calls without a deadline age (`model.PATIENCE_S`)."""

    name = "edf"

    def key(self, ticket: QueuedRequest) -> Key:
        return (ticket.call.due_or_patience_s,)
