"""Strict levels: urgency 0 before 1 before 2, first come first served within one level.

The tenant's entitlement has bounded the level before it gets here (the gateway's `admit`). A flood at a high level starves
the rest; that is what strict means, and why this is not a default.
"""

from tidegate_policy.policies.policy_contract import Key, OneLane, QueuedRequest


class Priority(OneLane):
    """By urgency level."""

    name = "priority"

    def key(self, ticket: QueuedRequest) -> Key:
        return (float(ticket.call.urgency),)
