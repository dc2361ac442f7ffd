"""`llf`: the least laxity goes first (H-MAS, section C.2).

The laxity of a workflow is the time that it can still lose: its final deadline, minus now, minus all work that is left in
it. That is the remaining work of this call and the work that follows the call. While a call waits, its laxity falls at the
same rate as that of every other waiting call, so its key is a constant instant. `urgency` measures against the due instant
of the stage instead, which is the call's share of the workflow's time (HexGen eq 5).
"""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Llf(StaticPolicy):
    """The key is the latest start of the workflow's remaining work."""

    name = "llf"
    rank_falls = True

    def key(self, item: QueuedRequest) -> Key:
        call = item.call
        deadline_at_s = call.due_or_patience_at_s if call.deadline_at_s is None else call.deadline_at_s
        return (call.bounded_at_s(deadline_at_s - call.left_s) - item.service_s,)
