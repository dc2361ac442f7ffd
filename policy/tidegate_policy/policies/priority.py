"""`priority`: strict levels. Urgency 0 goes before 1, 1 before 2; within a level the first to come goes first.

The gateway's admission has bounded the level by the tenant's entitlement. A flood at a high level starves the lower
levels, so this policy is not a default.
"""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Priority(StaticPolicy):
    """The key is the urgency level."""

    name = "priority"

    def key(self, item: QueuedRequest) -> Key:
        return (float(item.call.urgency),)
