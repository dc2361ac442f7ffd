"""`fence`: calls start only while the memory that all running calls may need at their end is there (H-MAS eq 2, 10, 11).

Each call is charged its prompt and a calibrated upper bound of its output. Prompt parts that running calls keep in the
prefix cache count once, because used memory is measured, not added up. Memory held for sessions is reclaimable and is not
charged.

Calls that the plan preempts give up their memory and what was promised to them, and only one call starts in such a step,
because they wait then and could start again. If that call does not fit, the fence takes the preemptions out of the plan.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import ClassVar

from tidegate_policy.engine.regulators.slot_preemption import MOST_VICTIMS
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepFacts, StepPlan
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import QueuedRequest
from tidegate_policy.predict.conformal_bound import ConformalBound

MARGIN = 0.03
"""Share of the KV cache that is never promised (the paper's delta_frag)."""
MOST_STARTS = 32
"""Calls that one step may start under the fence. No more are looked at than places are free or can be taken."""
COUNT_AGAIN = 64
"""Steps after which the promises to the running calls are added up again."""


class Fence:
    """The regulator."""

    SAFETY: ClassVar[bool] = True

    def __init__(self) -> None:
        self._bound = ConformalBound()
        self._margins: dict[int, int] = {}
        """The margins of the bound, by the `bit_length` of the prompt."""
        self._most = 0
        """A bound of the output that is promised to the running calls, without the margins."""
        self._counted = 0
        """The number of the last start that is counted in it."""
        self._changes = -1
        self._steps = 0
        """Steps since the promises were added up."""

    def observe(self, facts: StepFacts) -> None:
        for ended in facts.ended:
            if ended.finished:
                prompt_tokens = ended.call.prompt_tokens
                self._bound.observe(prompt_tokens, ended.call.output_predicted, ended.output_tokens)
                self._margins[prompt_tokens.bit_length()] = self._bound.margin(prompt_tokens)

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.waiting:
            return plan
        places = max(engine.places(plan), 0)
        wanted = 1 if plan.preempt else min(places + MOST_VICTIMS, MOST_STARTS, engine.waiting)
        room = int(engine.limits.kv_tokens * (1 - MARGIN))
        room -= engine.limits.kv_tokens - engine.free_kv_tokens - engine.pinned_kv_tokens
        room += sum(engine.own_kv_tokens(call_id, enough=engine.limits.kv_tokens) for call_id in plan.preempt)
        room -= sum(call.uncached_tokens for call in engine.prefills if call.call.id not in plan.preempt)
        margin = max((0, *self._margins.values()))
        output = engine.sizes.output_tokens + margin
        starts = wanted
        if engine.running_count * output + wanted * (engine.sizes.context_tokens + output) > room:
            starts = self._fitting(engine, wanted, room, margin, plan.preempt)
        if not starts and plan.preempt:
            plan = replace(plan, preempt=())
        return plan.at_most(starts=starts)

    def _fitting(self, engine: EngineSnapshot, wanted: int, room: int, margin: int, preempt: tuple[CallId, ...]) -> int:
        """How many of the first `wanted` waiting calls fit into `room` tokens beside the output that is promised to the
        running calls, without `preempt`. No margin is greater than `margin`. Where fewer can start now, any other call may
        become able to start, and is charged as the greatest. Mostly few fit, so it looks at no call behind the first that
        does not."""
        most_output = self._most_output(engine) + margin * engine.running_count
        if self._charged(engine, wanted, room - most_output, margin, engine.most_uncached_tokens) == wanted:
            return wanted
        return self._charged(engine, wanted, room - self._output(engine, preempt), margin, engine.memory_tokens)

    def _charged(
        self, engine: EngineSnapshot, wanted: int, room: int, margin: int, prompt_of: Callable[[QueuedRequest], int]
    ) -> int:
        """How many of the first `wanted` waiting calls fit into `room` tokens, if `prompt_of` tells their prompt tokens."""
        starts = 0
        for item in islice(engine.startable(), wanted):
            room -= prompt_of(item) + self._upper(item.call)
            if room < 0:
                return starts
            starts += 1
        greatest = engine.sizes.context_tokens + engine.sizes.output_tokens + margin
        return starts + min(max(room, 0) // greatest, wanted - starts)

    def _most_output(self, engine: EngineSnapshot) -> int:
        """A bound of `_output` without the margins. Progress only lowers the promise to a call, so only calls that are new
        are looked at."""
        self._steps += 1
        if self._steps >= COUNT_AGAIN or self._changes != engine.changes:
            self._steps, self._changes, self._most, self._counted = 0, engine.changes, 0, 0
        for known in engine.started_after(self._counted):
            self._most += max(max(known.call.output_predicted, known.call.output_upper) - known.output_tokens, 1)
        self._counted = engine.starts
        return self._most

    def _output(self, engine: EngineSnapshot, preempt: tuple[CallId, ...]) -> int:
        """Output tokens that the running calls without `preempt` may still add: `max(_upper - output_tokens, output_left)`
        of each. A call within its prediction has the rest of the greater of bound and prediction left, any other at least
        one token."""
        tokens, margin_of = 0, self._margins.get
        for known in engine.started_after(0):
            call = known.item.call
            if call.id in preempt:
                continue
            upper = call.output_predicted + max(margin_of(call.prompt_tokens.bit_length(), 0), 0)
            left = (upper if upper > call.output_upper else call.output_upper) - known.output_tokens
            tokens += left if left > 1 else 1
        return tokens

    def _upper(self, call: Call) -> int:
        """The calibrated bound, or what the gateway sent with the call if that is greater."""
        return max(call.output_predicted + self._margins.get(call.prompt_tokens.bit_length(), 0), call.output_upper, 1)
