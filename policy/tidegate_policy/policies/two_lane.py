"""`two-lane`: short calls do not wait behind long calls, and long calls still get their share (H-MAS, section C.2).

A call belongs to the fast lane when its predicted total time `T_tot = t_ttft + t_tpot * l_pred` is at most the threshold,
else to the slow lane. Within a lane the smallest slack `S = D - V_sys - T_tot` goes first. V_sys, the clock, is common to
all calls, so the key is the constant `D - T_tot`. While calls wait in both lanes, the fast lane gets `fast_share` of the
starts. Credit decides each turn, so the slow lane never starves and no randomness is needed.

Victims are chosen by slack without regard to the lane. A rank that begins with the lane preempts the slow calls that the
turns of their lane have just admitted, and the turns admit them again.
"""

import types
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tidegate_policy.policies.policy_contract import Key, Parameter, QueuedRequest, SchedulerContext, StaticPolicy

FAST, SLOW = 0, 1
STRETCH = 3.0
"""Times its own work that a call without a due instant may take, for the choice of victims."""


@dataclass(slots=True, kw_only=True)
class SharedTurns:
    """Gives the fast lane `fast_share` of the starts while calls wait in both lanes."""

    fast_share: float
    fast_credit: float = 0.0
    """Starts that the policy owes to the fast lane. It moves only while calls wait in both lanes."""

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        if len(lanes) == 1:
            return next(iter(lanes))
        return FAST if self.fast_credit + self.fast_share > 0 else SLOW

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        if len(lanes) > 1:
            self.fast_credit += self._price(lane)

    def copy(self) -> "SharedTurns":
        return replace(self)

    def _price(self, lane: int) -> float:
        return self.fast_share - (1.0 if lane == FAST else 0.0)


class TwoLane(StaticPolicy):
    """A fast and a slow lane; the smallest slack goes first within each lane."""

    name = "two-lane"
    lane_names = types.MappingProxyType({FAST: "fast", SLOW: "slow"})
    PARAMETERS = (
        Parameter(
            name="threshold_s",
            default=4.0,
            low=0.01,
            high=3600.0,
            unit="seconds",
            meaning="A call of at most this much predicted work belongs to the fast lane.",
        ),
        Parameter(
            name="fast_share",
            default=0.75,
            low=0.01,
            high=0.99,
            unit="share of the starts",
            meaning="The fast lane gets this share of the starts while calls wait in both lanes.",
        ),
    )

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._threshold_s = self.parameters["threshold_s"]
        self.turns = SharedTurns(fast_share=self.parameters["fast_share"])

    def lane(self, item: QueuedRequest) -> int:
        return FAST if item.service_s <= self._threshold_s else SLOW

    def key(self, item: QueuedRequest) -> Key:
        return (item.call.due_or_patience_at_s - item.service_s,)

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        threshold_s = self._threshold_s
        return [FAST if item.service_s <= threshold_s else SLOW for item in items]

    def rank(self, item: QueuedRequest) -> Key:
        """The slack. A call without a due instant counts as due in proportion to its size, else short calls would have the
        greatest slack and yield to long ones."""
        call = item.call
        if call.due_at_s is not None:
            due_at_s = call.due_or_patience_at_s
        else:
            due_at_s = call.arrived_at_s + self._threshold_s + STRETCH * self.context.cost().call_seconds(call)
        return (due_at_s - item.service_s,)
