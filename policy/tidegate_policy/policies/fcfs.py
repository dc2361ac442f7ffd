"""`fcfs`: first come, first served. It is vLLM's own schedule, and it needs no prediction."""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Fcfs(StaticPolicy):
    """All keys are equal, so the arrival order of the queue decides."""

    name = "fcfs"

    def key(self, item: QueuedRequest) -> Key:
        return ()
