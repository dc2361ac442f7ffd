"""`fence`: calls start only while the memory that all running calls may need at their end is there (H-MAS eq 2, 10, 11).

Each call is charged its prompt and a calibrated upper bound of its output. Prompt parts that running calls keep in the
prefix cache count once, because used memory is measured, not added up. Memory held for sessions is reclaimable and is not
charged.

Calls that the plan preempts give up their memory and what was promised to them, and only one call starts in such a step,
because they wait then and could start again. If that call does not fit, the fence takes the preemptions out of the plan.
"""

import operator
from collections.abc import Callable, Collection
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
LEAST_CHARGE = 2
"""Tokens that each call takes at least: one of its prompt and one of its output."""
_SLACK = 64
"""Bounds of calls that no longer run, tolerated beyond one for each running call."""


class Fence:
    """The regulator."""

    SAFETY: ClassVar[bool] = True

    def __init__(self) -> None:
        self._bound = ConformalBound()
        self._margins: dict[int, int] = {}
        """The margins of the bound, by the `bit_length` of the prompt."""
        self._most_margin = 0
        """The greatest of them that is not negative."""
        self._uppers: dict[CallId, int] = {}
        """`_upper` of each running call, and of some that no longer run. Only a change of the margins or of a call changes
        it, so a step takes the outputs off it and need not look at the calls."""
        self._uppers_of = 0
        """The number of the last start whose call is in it."""
        self._uppers_changes = -1
        self._sum: int | None = None
        """`_output` of all running calls when it was last needed; None = a margin has changed since."""
        self._sum_of = (0, 0, 0)
        """The calls that had changed or left then, and the output tokens that had been delivered."""
        self._sum_starts = 0
        """The number of the last start whose call is in it."""

    def observe(self, facts: StepFacts) -> None:
        for ended in facts.ended:
            if ended.finished:
                prompt_tokens = ended.call.prompt_tokens
                self._bound.observe(prompt_tokens, ended.call.output_predicted, ended.output_tokens)
                bucket, margin = prompt_tokens.bit_length(), self._bound.margin(prompt_tokens)
                if margin != self._margins.get(bucket):
                    self._margins[bucket] = margin
                    self._most_margin = max((0, *self._margins.values()))
                    self._uppers.clear()
                    self._uppers_of = 0
                    self._sum = None

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.waiting:
            return plan
        places = max(engine.places(plan), 0)
        wanted = 1 if plan.preempt else min(places + MOST_VICTIMS, MOST_STARTS, engine.waiting)
        if not plan.preempt and plan.max_starts is not None and plan.max_starts < wanted:
            wanted = plan.max_starts  # more would not start
            if wanted <= 0:
                return plan
        room = int(engine.limits.kv_tokens * (1 - MARGIN))
        room -= engine.limits.kv_tokens - engine.free_kv_tokens - engine.pinned_kv_tokens
        if plan.preempt:
            room += sum(engine.own_kv_tokens(call_id, enough=engine.limits.kv_tokens) for call_id in plan.preempt)
        if engine.prefills:
            room -= sum(call.uncached_tokens for call in engine.prefills if call.call.id not in plan.preempt)
        margin = self._most_margin
        output = engine.sizes.output_tokens + margin
        starts = wanted
        if engine.running_count * output + wanted * (engine.sizes.context_tokens + output) > room:
            starts = self._fitting(engine, wanted, room, margin, plan.preempt)
        if not starts and plan.preempt:
            plan = replace(plan, preempt=())
        return plan.at_most(starts=starts)

    def _fitting(self, engine: EngineSnapshot, wanted: int, room: int, margin: int, preempt: Collection[CallId]) -> int:
        """How many of the first `wanted` waiting calls fit into `room` tokens beside the output that is promised to the
        running calls, without `preempt`. No margin is greater than `margin`. Where fewer can start now, any other call may
        become able to start, and is charged as the greatest. Mostly few fit, so it looks at no call behind the first that
        does not."""
        if not preempt and not self._fits(engine, room - self._least_output(engine)):
            return 0
        room -= self._output(engine, preempt)
        if room < LEAST_CHARGE:
            return 0
        if self._charged(engine, wanted, room, margin, engine.most_uncached_tokens) == wanted:
            return wanted
        return self._charged(engine, wanted, room, margin, engine.memory_tokens)

    def _charged(
        self, engine: EngineSnapshot, wanted: int, room: int, margin: int, prompt_of: Callable[[QueuedRequest], int]
    ) -> int:
        """How many of the first `wanted` waiting calls fit into `room` tokens, if `prompt_of` tells their prompt tokens, of
        which each call has at least one."""
        starts = 0
        for item in islice(engine.startable(), wanted):
            room -= self._upper(item.call)
            if room < 1:
                return starts
            room -= prompt_of(item)
            if room < 0:
                return starts
            starts += 1
        greatest = engine.sizes.context_tokens + engine.sizes.output_tokens + margin
        return starts + min(max(room, 0) // greatest, wanted - starts)

    def _fits(self, engine: EngineSnapshot, room: int) -> bool:
        """Whether the first waiting call may fit into `room` tokens."""
        if room < LEAST_CHARGE:
            return False
        return engine.head is None or self._upper(engine.head.call) < room

    def _least_output(self, engine: EngineSnapshot) -> int:
        """A lower bound of `_output` of all running calls, without a look at them: each token that was delivered since the
        last sum lowers it by one at most, and each start raises it. After the end of a call the bound is 0."""
        changes, leaves, delivered = self._sum_of
        if self._sum is None or changes != engine.changes or leaves != engine.leaves:
            return 0
        if self._sum_starts != engine.starts:
            for known in engine.started_after(self._sum_starts):
                self._sum += max(self._upper(known.item.call) - known.output_tokens, 1)
            self._sum_starts = engine.starts
        return self._sum - (engine.delivered - delivered)

    def _output(self, engine: EngineSnapshot, preempt: Collection[CallId]) -> int:
        """Output tokens that the running calls without `preempt` may still add: `max(_upper - output_tokens, output_left)`
        of each. A call within its prediction has the rest of the greater of bound and prediction left, any other at least
        one token."""
        running = engine.running_ids
        if preempt:
            running = [call_id for call_id in running if call_id not in preempt]
        uppers = map(self._running_uppers(engine).__getitem__, running)
        left = list(map(operator.sub, uppers, engine.outputs_of(running)))
        total = sum(left) if not left or min(left) >= 1 else sum([tokens if tokens > 1 else 1 for tokens in left])
        if not preempt:
            self._sum, self._sum_starts = total, engine.starts
            self._sum_of = (engine.changes, engine.leaves, engine.delivered)
        return total

    def _running_uppers(self, engine: EngineSnapshot) -> dict[CallId, int]:
        """`_uppers`, made up to date."""
        uppers, margin_of = self._uppers, self._margins.get
        if self._uppers_changes != engine.changes or len(uppers) > 2 * engine.running_count + _SLACK:
            uppers.clear()
            self._uppers_of, self._uppers_changes = 0, engine.changes
        for known in engine.started_after(self._uppers_of):
            call = known.item.call
            upper = call.output_predicted + max(margin_of(call.prompt_tokens.bit_length(), 0), 0)
            uppers[call.id] = upper if upper > call.output_upper else call.output_upper
        self._uppers_of = engine.starts
        return uppers

    def _upper(self, call: Call) -> int:
        """The calibrated bound, or what the gateway sent with the call if that is greater."""
        return max(call.output_predicted + self._margins.get(call.prompt_tokens.bit_length(), 0), call.output_upper, 1)
