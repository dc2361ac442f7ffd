"""`mlfq`: a multi-level feedback queue with skip-join and a boost (H-MAS C.2; skip-join after FastServe).

A call starts in the level whose quantum its prompt fits into, and falls to a lower level whenever the work that it
received exceeds the quantum of its level. Each level's quantum is `growth` times that of the level above. The highest level
goes first, and within a level the first to come. It needs no prediction of output lengths: long calls show themselves.

A call that has waited `boost_s` goes before all calls that were not boosted, the oldest first, and begins again in the
highest level. In vLLM only preempted calls return to the queue, so demotion mostly decides which running call yields.
"""

import bisect
from collections.abc import Mapping, Sequence

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
        self._keys: list[Key] = [(float(level),) for level in range(LEVELS)]
        self._entry: dict[CallId, int] = {}
        """The level in which each call began."""
        self._boosted: set[CallId] = set()
        self._tokens = token_counts.TokenCounts()
        """The work that each call received since it began in its level."""
        self._waits = overdue.Overdue()

    def key(self, item: QueuedRequest) -> Key:
        return (float(self._level(item.call)),)

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        entry, keys = self._entry, self._keys
        moved = self._boosted.union(self._tokens)
        return [
            keys[entry[call_id]] if (call_id := item.call.id) in entry and call_id not in moved else self.key(item)
            for item in items
        ]

    def rank(self, item: QueuedRequest) -> Key:
        return (float(self._level(item.call)), item.call.arrived_at_s)

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        call = item.call
        self._entry[call.id] = self._entry_level(call.prompt_tokens)
        self._waits.watch(call.id, call.arrived_at_s + self._boost_s)
        return self._boost(now)

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        levels: dict[int, int] = {}
        ends: dict[str, float] = {}
        for item in items:  # in one pass, because the calls come from far memory
            call = item.call
            call_id, prompt_tokens = call.id, call.prompt_tokens
            if prompt_tokens not in levels:
                levels[prompt_tokens] = self._entry_level(prompt_tokens)
            self._entry[call_id] = levels[prompt_tokens]
            ends[call_id] = call.arrived_at_s + self._boost_s
        self._waits.watch_all(ends)
        changed: list[CallId] = []
        while now >= self._waits.first_at_s:
            changed += self._boost(now)
        return changed

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        call_id = item.call.id
        self._waits.forget(call_id)
        if call_id in self._boosted:
            self._entry[call_id] = 0
        return self._boost(now)

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        self._tokens.add(computed)
        return self._boost(now)

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        call_id = item.call.id
        self._boosted.discard(call_id)
        if call_id in self._entry:
            self._waits.watch(call_id, now + self._boost_s)
        return self._boost(now)

    def on_end(self, now: float, call_id: CallId) -> Changed:
        self._entry.pop(call_id, None)
        self._boosted.discard(call_id)
        self._tokens.forget(call_id)
        self._waits.forget(call_id)
        return self._boost(now)

    def _entry_level(self, prompt_tokens: int) -> int:
        """A call begins in the level whose quantum its prompt fits into: its first token comes within it (skip-join)."""
        return bisect.bisect_left(self._quanta, self.context.cost().prefill_s * prompt_tokens)

    def _level(self, call: Call) -> int:
        entry = self._entry.get(call.id)
        if entry is None:
            return self._entry_level(call.prompt_tokens)
        prompt_tokens, output_tokens = self._tokens.of(call.id)
        if not (prompt_tokens or output_tokens):
            return BOOSTED if call.id in self._boosted else entry
        cost = self.context.cost()
        alone_s = cost.step_s + cost.decode_s + cost.context_s * call.prompt_tokens
        work_s = cost.prefill_s * prompt_tokens + alone_s * output_tokens
        return max(entry, bisect.bisect_left(self._quanta, work_s))

    def _boost(self, now: float) -> Changed:
        if now < self._waits.first_at_s:
            return NONE_CHANGED
        boosted = [CallId(call_id) for call_id in self._waits.take(now)]
        self._boosted.update(boosted)
        for call_id in boosted:
            self._tokens.forget(call_id)
        return boosted
