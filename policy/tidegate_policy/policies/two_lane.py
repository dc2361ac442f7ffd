"""H-MAS's two lanes: short calls do not wait behind long ones, and long ones still get their share (section C.2).

A call is *fast* when its predicted total time `T_tot = t_ttft + t_tpot * l_pred` is at most the threshold, else *slow*.
Within a lane the smallest slack `S = D - V_sys - T_tot` goes first; V_sys, the clock, is common to all, so the key is
the constant `D - T_tot`. The gate gives the fast lane `fast_share` of the pops while both lanes wait, by credit, so the
slow lane is never starved and no randomness is needed.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tidegate_policy.policies.policy_contract import Gate, Key, QueuedRequest

FAST, SLOW = 0, 1


@dataclass(slots=True, kw_only=True)
class ShareGate:
    """Hands out turns so that the fast lane gets `fast_share` of them while both lanes wait."""

    fast_share: float
    fast_credit: float = 0.0
    """Turns owed to the fast lane, in (-1, 1); it only moves while both lanes wait."""

    def next_lane(self, waiting: AbstractSet[int]) -> int:
        if len(waiting) == 1:
            return next(iter(waiting))
        return FAST if self.fast_credit + self.fast_share > 0 else SLOW

    def on_pop(self, lane: int, waiting: AbstractSet[int]) -> None:
        if len(waiting) > 1:
            self.fast_credit += self.fast_share - (1.0 if lane == FAST else 0.0)

    def copy(self) -> "ShareGate":
        return replace(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLane:
    """Fast and slow lanes, slack within each."""

    name: str = "two-lane"
    threshold_s: float = 4.0
    """Predicted seconds that still count as fast."""
    fast_share: float = 0.75
    """Share of the turns that the fast lane gets while both lanes wait; in (0, 1)."""

    def lane(self, ticket: QueuedRequest) -> int:
        return FAST if ticket.service_s <= self.threshold_s else SLOW

    def key(self, ticket: QueuedRequest) -> Key:
        return (ticket.call.due_or_patience_s - ticket.service_s,)

    def gate(self) -> Gate:
        return ShareGate(fast_share=self.fast_share)
