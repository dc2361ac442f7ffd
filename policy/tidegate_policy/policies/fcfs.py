"""First come, first served: vLLM's own order, and the place to flee to when nothing else can be trusted."""

from tidegate_policy.policies.policy_contract import Key, OneLane, QueuedRequest


class Fcfs(OneLane):
    """Everybody has the same key, so the queue's own arrival sequence decides."""

    name = "fcfs"

    def key(self, ticket: QueuedRequest) -> Key:
        return ()
