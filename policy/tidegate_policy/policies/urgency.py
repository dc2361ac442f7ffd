"""HexGen-Text2SQL's local queue: the call most at risk of missing its stage budget goes first (section 4.2).

The paper's urgency `U = t_comp - (t_slo - waited)` (eq 6) grows at the same rate for every waiting call, so the call
with the highest U (eq 7) is at every instant the one with the smallest latest start, `due - t_comp`, which is constant.
"""

from tidegate_policy.policies.policy_contract import Key, OneLane, QueuedRequest


class Urgency(OneLane):
    """By latest start: the instant after which the call can no longer be in time."""

    name = "urgency"

    def key(self, ticket: QueuedRequest) -> Key:
        return (ticket.call.due_or_patience_s - ticket.service_s,)
