"""The selector `fixed`: the first allowed policy, always. Emergencies still switch to the safe policy for a while."""

from collections.abc import Collection
from dataclasses import dataclass

from tidegate_policy.qos import Qos
from tidegate_policy.steer.proposal import Memory, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChoice:
    """The selector."""

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        first = next(iter(allow), active)
        return None if first == active else Proposal(policy=first, reason="fixed: it is the first policy of the spec")
