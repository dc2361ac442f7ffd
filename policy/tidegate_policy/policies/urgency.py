"""`urgency`: the call that is most at risk of missing its stage budget goes first (HexGen-Text2SQL, section 4.2).

The paper's urgency `U = t_comp - (t_slo - waited)` (eq 6) grows at the same rate for every waiting call. So the call with
the highest U (eq 7) is always the call with the earliest latest start, `due - t_comp`, and this instant is constant.
"""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Urgency(StaticPolicy):
    """The key is the latest start: the instant after which the call can no longer finish in time."""

    name = "urgency"
    rank_falls = True

    def key(self, item: QueuedRequest) -> Key:
        return (item.call.due_or_patience_at_s - item.service_s,)
