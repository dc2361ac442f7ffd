"""Shortest job first: the lowest mean latency, at the price of long calls under sustained overload."""

from tidegate_policy.policies.policy_contract import Key, OneLane, QueuedRequest


class Sjf(OneLane):
    """By predicted seconds of work (HexGen eq 2)."""

    name = "sjf"

    def key(self, ticket: QueuedRequest) -> Key:
        return (ticket.service_s,)
