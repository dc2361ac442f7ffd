"""`mlfq`: a multi-level feedback queue with skip-join and a boost (H-MAS C.2; skip-join after FastServe).

A call starts in the level whose quantum its prompt fits into, and falls to a lower level whenever the work that it
received exceeds the quantum of its level. Each level's quantum is `growth` times that of the level above. The highest level
goes first, and within a level the first to come. It needs no prediction of output lengths: long calls show themselves.

A call that has waited `boost_s` goes before all calls that were not boosted, the oldest first, and begins again in the
highest level. In vLLM only preempted calls return to the queue, so demotion mostly decides which running call yields.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import overdue, token_counts
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

LEVELS = 6
BOOSTED = -1


@dataclass(slots=True, eq=False)
class _Attained:
    """The work that a call received."""

    entry_level: int
    output_s: float
    """Seconds of a decode step of the call alone."""
    boost_at_s: float
    boosted: bool = False


class Mlfq(StaticPolicy):
    """The key is the level."""

    name = "mlfq"
    PARAMETERS = (
        Parameter(
            name="quantum_s",
            default=1.0,
            low=0.001,
            high=3600.0,
            unit="seconds",
            meaning="A call that received more work than this leaves the highest level.",
        ),
        Parameter(
            name="growth",
            default=2.0,
            low=1.1,
            high=100.0,
            unit="ratio",
            meaning="The quantum of each level is this many times the quantum of the level above it.",
        ),
        Parameter(
            name="boost_s",
            default=60.0,
            low=0.1,
            high=86400.0,
            unit="seconds",
            meaning="A call that has waited this long goes before all calls that have not.",
        ),
    )
    keys_change = True

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        quantum_s, growth = self.parameters["quantum_s"], self.parameters["growth"]
        self._quanta = [quantum_s * growth**level for level in range(LEVELS - 1)]
        self._boost_s = self.parameters["boost_s"]
        self._calls: dict[CallId, _Attained] = {}
        self._tokens = token_counts.TokenCounts()
        self._waits = overdue.Overdue()

    def key(self, item: QueuedRequest) -> Key:
        return (float(self._level(item.call)),)

    def rank(self, item: QueuedRequest) -> Key:
        return (float(self._level(item.call)), item.call.arrived_at_s)

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        attained = self._calls[item.call.id] = self._new(item.call, self.context.cost())
        self._waits.watch(item.call.id, attained.boost_at_s)
        return self._boost(now)

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        cost = self.context.cost()
        calls = {item.call.id: self._new(item.call, cost) for item in items}
        self._calls.update(calls)
        self._waits.watch_all({call_id: attained.boost_at_s for call_id, attained in calls.items()})
        changed: list[CallId] = []
        while now >= self._waits.first_at_s:
            changed += self._boost(now)
        return changed

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        self._waits.forget(item.call.id)
        attained = self._calls.get(item.call.id)
        if attained is not None and attained.boosted:
            attained.entry_level = 0
        return self._boost(now)

    def on_skip(self, now: float, item: QueuedRequest) -> Changed:
        attained = self._calls.get(item.call.id)
        if attained is not None and not attained.boosted:
            self._waits.watch(item.call.id, attained.boost_at_s)
        return self._boost(now)

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        self._tokens.add(computed)
        return self._boost(now)

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        attained = self._calls.get(item.call.id)
        if attained is not None:
            attained.boosted = False
            attained.boost_at_s = now + self._boost_s
            self._waits.watch(item.call.id, attained.boost_at_s)
        return self._boost(now)

    def on_end(self, now: float, call_id: CallId) -> Changed:
        self._calls.pop(call_id, None)
        self._tokens.forget(call_id)
        self._waits.forget(call_id)
        return self._boost(now)

    def _new(self, call: Call, cost: CostModel) -> _Attained:
        """A call begins in the level whose quantum its prompt fits into: its first token comes within it (skip-join)."""
        output_s = cost.step_s + cost.decode_s + cost.context_s * call.prompt_tokens
        entry_level = bisect.bisect_left(self._quanta, cost.prefill_s * call.prompt_tokens)
        return _Attained(entry_level, output_s, call.arrived_at_s + self._boost_s)

    def _level(self, call: Call) -> int:
        attained = self._calls.get(call.id)
        if attained is None:
            return self._new(call, self.context.cost()).entry_level
        prompt_tokens, output_tokens = self._tokens.of(call.id)
        if not (prompt_tokens or output_tokens):
            return BOOSTED if attained.boosted else attained.entry_level
        work_s = self.context.cost().prefill_s * prompt_tokens + attained.output_s * output_tokens
        return max(attained.entry_level, bisect.bisect_left(self._quanta, work_s))

    def _boost(self, now: float) -> Changed:
        if now < self._waits.first_at_s:
            return NONE_CHANGED
        boosted = self._waits.take(now)
        for call_id in boosted:
            self._calls[CallId(call_id)].boosted = True
            self._tokens.forget(CallId(call_id))
        return [CallId(call_id) for call_id in boosted]
