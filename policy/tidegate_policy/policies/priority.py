"""`priority`: strict levels. Urgency 0 goes before 1, 1 before 2; within a level the first to come goes first.

The gateway's admission has bounded the level by the tenant's entitlement. A flood at a high level starves the lower
levels, so this policy is not a default. Clients that talk to an engine without a gateway have one level. Among them the
engine's own `priority` field decides, then the arrival, as in vLLM.
"""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Priority(StaticPolicy):
    """The key is the urgency level, then the number and the arrival that a client without labels has."""

    name = "priority"
    protects_progress = False

    def key(self, item: QueuedRequest) -> Key:
        call = item.call
        return (call.urgency, call.client_priority, call.client_arrived_s)
