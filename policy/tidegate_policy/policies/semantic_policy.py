"""`semantic`: the most urgent level goes first, and within a level the shortest remaining time (Semantic Scheduling 3.3).

In the paper's order a flood at an urgent level starves all lower levels, and short calls starve long ones. This policy
bounds both. Each level that waits earns `level_share` of the work that starts while it is passed over, and starts a call
when it has earned one. Within a level a call that has waited `patience_s` goes before the others, the oldest first; it
never goes before a more urgent level. Levels are lanes, so a guaranteed start changes no key.

The paper's victims are the lowest level and the longest remaining time. A call that started on the guaranteed share of its
level ranks with the most urgent level, else the victim rule would take back what the share has just given.
"""

import types
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from tidegate_policy.model import LEAST_URGENT, MOST_URGENT, CallId
from tidegate_policy.policies import overdue
from tidegate_policy.policies.policy_contract import (
    NONE_CHANGED,
    Changed,
    Computed,
    Key,
    Parameter,
    QueuedRequest,
    SchedulerContext,
    StaticPolicy,
)

MEMORY = 0.1
"""Weight of a new call in the mean work of its level."""
LIFTED: Key = (-1.0,)
"""The key of a call whose patience has ended: before all remaining seconds."""


class Semantic(StaticPolicy):
    """The lane is the urgency level; the key is the remaining seconds, or `LIFTED`."""

    name = "semantic"
    lane_names = types.MappingProxyType({level: f"urgency {level}" for level in range(LEAST_URGENT + 1)})
    PARAMETERS = (
        Parameter(
            name="level_share",
            default=0.02,
            low=0.0,
            high=0.2,
            unit="share of the work",
            meaning="Each level that waits gets at least this share of the work that starts.",
        ),
        Parameter(
            name="patience_s",
            default=30.0,
            low=0.1,
            high=86400.0,
            unit="seconds",
            meaning="A call that has waited this long goes before the others of its level.",
        ),
    )
    keys_change = True

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self._patience_s = self.parameters["patience_s"]
        self._mean_s: dict[int, float] = {}
        """Mean predicted work of the calls of each level."""
        self._waiting: dict[CallId, int] = {}
        """The level of each waiting call; a call that is being started is not in it."""
        self._levels: Counter[int] = Counter()
        self._started: set[CallId] = set()
        self._lifted: set[CallId] = set()
        self._guaranteed: set[CallId] = set()
        """Calls that are served on the guaranteed share of their level."""
        self._patience = overdue.Overdue()
        self._turns = LevelTurns(self, self.parameters["level_share"])
        self.turns = self._turns

    def price(self, level: int) -> float:
        """Predicted seconds that a start at this level stands for."""
        return self._mean_s.get(level, 1.0)

    def waits(self, level: int) -> bool:
        """Whether a call of this level waits, also one that cannot start now."""
        return level in self._levels

    def lane(self, item: QueuedRequest) -> int:
        return item.call.urgency

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        return [item.call.urgency for item in items]

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        lifted = self._lifted
        if not lifted:
            return [(item.service_s,) for item in items]
        return [LIFTED if item.call.id in lifted else (item.service_s,) for item in items]

    def key(self, item: QueuedRequest) -> Key:
        return LIFTED if item.call.id in self._lifted else (item.service_s,)

    def rank(self, item: QueuedRequest) -> Key:
        level = MOST_URGENT if item.call.id in self._guaranteed else item.call.urgency
        return (float(level), item.service_s)

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        self._patience.watch(item.call.id, self._arrives(item))
        return self._lift(now)

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        means, waiting, patience_s = self._mean_s, self._waiting, self._patience_s
        levels: list[int] = []
        ends: dict[str, float] = {}
        for item in items:  # in one pass, because the calls come from far memory
            call, service_s = item.call, item.service_s
            call_id, level = call.id, call.urgency
            mean_s = means.get(level, service_s)
            means[level] = mean_s + MEMORY * (service_s - mean_s)
            waiting[call_id] = level
            levels.append(level)
            ends[call_id] = call.arrived_at_s + patience_s
        self._levels.update(levels)
        self._patience.watch_all(ends)
        changed: list[CallId] = []
        while now >= self._patience.first_at_s:
            changed += self._lift(now)
        return changed

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        call_id = item.call.id
        level = self._waiting.get(call_id)
        if level is not None:
            self._started.add(call_id)
            self._leave(call_id)
            if self._turns.is_earned:
                self._guaranteed.add(call_id)
        self._turns.is_earned = False  # while the policy fails, calls start without a turn
        return self._lift(now)

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        return self._lift(now)

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        call_id = item.call.id
        self._guaranteed.discard(call_id)
        if call_id in self._started:
            self._started.remove(call_id)
            self._lifted.discard(call_id)
            self._waiting[call_id] = item.call.urgency
            self._levels[item.call.urgency] += 1
            self._patience.watch(call_id, now + self._patience_s)
        return self._lift(now)

    def on_end(self, now: float, call_id: CallId) -> Changed:
        if call_id in self._waiting:
            self._leave(call_id)
        self._started.discard(call_id)
        self._lifted.discard(call_id)
        self._guaranteed.discard(call_id)
        return self._lift(now)

    def _arrives(self, item: QueuedRequest) -> float:
        """Returns the end of the call's patience."""
        call, service_s = item.call, item.service_s
        level = call.urgency
        mean_s = self._mean_s.get(level, service_s)
        self._mean_s[level] = mean_s + MEMORY * (service_s - mean_s)
        ends_at_s = call.arrived_at_s + self._patience_s
        self._waiting[call.id] = level
        self._levels[level] += 1
        return ends_at_s

    def _leave(self, call_id: CallId) -> None:
        level = self._waiting.pop(call_id)
        self._levels[level] -= 1
        if not self._levels[level]:
            del self._levels[level]
        self._patience.forget(call_id)

    def _lift(self, now: float) -> Changed:
        if now < self._patience.first_at_s:
            return NONE_CHANGED
        changed = [CallId(call_id) for call_id in self._patience.take(now)]
        self._lifted.update(changed)
        return changed


class LevelTurns:
    """The most urgent level is next, unless a level that was passed over has earned a start."""

    def __init__(self, policy: Semantic, share: float, earned_s: dict[int, float] | None = None) -> None:
        self._policy = policy
        self._share = share
        self._earned_s = {} if earned_s is None else earned_s
        """Seconds of work that each level has earned while it waited."""
        self.is_earned = False
        """Whether the start that follows the last turn uses the guaranteed share of its level."""

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        first = min(lanes)
        if not self._share or len(lanes) == 1:
            return first
        earned = [
            (self._earned_s[level] / max(self._policy.price(level), 1e-9), -level)
            for level in lanes
            if level != first and level in self._earned_s
        ]
        starts, level = max(earned, default=(0.0, 0))
        return -level if starts >= 1 else first

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        self._earned_s = {
            level: earned_s for level, earned_s in self._earned_s.items() if level in lanes or self._policy.waits(level)
        }
        first, price_s = min(lanes), self._policy.price(lane)
        self.is_earned = lane != first and 0.0 < price_s <= self._earned_s.get(lane, 0.0)
        for level in lanes:
            if level != first:
                self._earned_s[level] = self._earned_s.get(level, 0.0) + self._share * price_s
        if lane != first:
            self._earned_s[lane] -= price_s

    def copy(self) -> "LevelTurns":
        return LevelTurns(self._policy, self._share, dict(self._earned_s))
