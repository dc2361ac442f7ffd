"""The selector `fixed`: it always proposes the first policy that is allowed and not banned.

The guards hold for it as for any selector: a pool starts with its start policy, emergencies switch to the safe policy for a
while, and a switch that harms is taken back. A policy that nothing changes is an override (`policy.mode: fixed` of a
ServingPool).
"""

from collections.abc import Collection
from dataclasses import dataclass

from tidegate_policy.qos import Qos
from tidegate_policy.steer.proposal import Memory, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChoice:
    """The selector."""

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        first = next(iter(allow), active)
        return (
            None
            if first == active
            else Proposal(policy=first, reason="fixed: it is the first policy that may be active")
        )
