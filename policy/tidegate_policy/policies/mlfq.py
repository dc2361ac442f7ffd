"""`mlfq`: a multi-level feedback queue with skip-join and a boost (H-MAS C.2; skip-join after FastServe).

A call starts in the level whose quantum its prompt fits into, and falls to a lower level whenever the work that it
received exceeds the quantum of its level. Each level's quantum is `growth` times that of the level above. The highest level
goes first, and within a level the first to come. It needs no prediction of output lengths: long calls show themselves.

A call that has waited `boost_s` goes before all calls that were not boosted, the oldest first, and begins again in the
highest level. In vLLM only preempted calls return to the queue, so demotion mostly decides which running call yields.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

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
        call = item.call
        cost = self.context.cost()
        output_s = cost.step_s + cost.decode_s + cost.context_s * call.prompt_tokens
        attained = _Attained(self._entry_level(call), output_s, call.arrived_at_s + self._boost_s)
        self._calls[call.id] = attained
        self._waits.watch(call.id, attained.boost_at_s)
        return self._boost(now)

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

    def _level(self, call: Call) -> int:
        attained = self._calls.get(call.id)
        if attained is None:
            return self._entry_level(call)
        prompt_tokens, output_tokens = self._tokens.prompts(call.id), self._tokens.outputs(call.id)
        if attained.boosted and not (prompt_tokens or output_tokens):
            return BOOSTED
        work_s = self.context.cost().prefill_s * prompt_tokens + attained.output_s * output_tokens
        return max(attained.entry_level, self._level_of(work_s))

    def _entry_level(self, call: Call) -> int:
        """The level whose quantum the prompt fits into: the call's first token comes within it (skip-join)."""
        return self._level_of(self.context.cost().prefill_s * call.prompt_tokens)

    def _level_of(self, work_s: float) -> int:
        return bisect.bisect_left(self._quanta, work_s)

    def _boost(self, now: float) -> Changed:
        boosted = self._waits.take(now)
        if not boosted:
            return NONE_CHANGED
        for call_id in boosted:
            self._calls[CallId(call_id)].boosted = True
            self._tokens.forget(CallId(call_id))
        return [CallId(call_id) for call_id in boosted]
