"""`srtf`: the call with the shortest remaining time goes first. It is `sjf` with preemption.

A call that ran and lost its place competes with the work that is left of it, recomputation included, and a running call is
a victim by the work that is left of it. `sjf` compares sizes instead.
"""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Srtf(StaticPolicy):
    """The key and the rank are the seconds of work that are left."""

    name = "srtf"

    def key(self, item: QueuedRequest) -> Key:
        return (item.service_s,)
