"""`sjf`: the shortest job goes first. It gives the lowest mean latency; long calls pay for it under sustained overload."""

from tidegate_policy.policies.policy_contract import Key, QueuedRequest, StaticPolicy


class Sjf(StaticPolicy):
    """The key is the predicted work in seconds (HexGen eq 2)."""

    name = "sjf"

    def key(self, item: QueuedRequest) -> Key:
        return (item.service_s,)
