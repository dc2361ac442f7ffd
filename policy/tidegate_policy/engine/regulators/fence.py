"""`fence`: calls start only while the memory that all running calls may need at their end is there (H-MAS eq 2, 10, 11).

Each call is charged its prompt and a calibrated upper bound of its output. Prompt parts that are in the prefix cache count
once, because used memory is measured, not added up. Memory held for sessions is reclaimable and is not charged.
"""

from dataclasses import replace
from typing import ClassVar

from tidegate_policy.engine.regulators.regulator import fewer_starts
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepFacts, StepPlan
from tidegate_policy.model import Call
from tidegate_policy.predict.conformal_bound import ConformalBound

MARGIN = 0.03
"""Share of the KV cache that is never promised (the paper's delta_frag)."""
MOST_STARTS = 32
"""Calls that one step may start under the fence."""


class Fence:
    """The regulator."""

    SAFETY: ClassVar[bool] = True

    def __init__(self) -> None:
        self._bound = ConformalBound()

    def observe(self, facts: StepFacts) -> None:
        for ended in facts.ended:
            if ended.finished:
                self._bound.observe(ended.call.prompt_tokens, ended.call.output_predicted, ended.output_tokens)

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if engine.head is None:
            return plan
        capacity = engine.limits.kv_tokens * (1 - MARGIN)
        promised = engine.limits.kv_tokens - engine.free_kv_tokens - engine.pinned_kv_tokens + self._promised(engine)
        first = engine.first(MOST_STARTS)
        uppers = [self._upper(item.call) for item in first]
        starts = len(first)
        if promised + sum(uppers) + sum(map(engine.most_uncached_tokens, first)) > capacity:
            starts = 0
            for item, upper in zip(first, uppers, strict=True):
                promised += engine.uncached_tokens(item) + upper
                if promised > capacity:
                    break
                starts += 1
        return replace(plan, max_starts=fewer_starts(plan, starts))

    def _promised(self, engine: EngineSnapshot) -> int:
        """Tokens that the running calls may still add. The loop runs for each of them in each step, so it computes
        `max(_upper - output_tokens, output_left)` with one comparison: a call within its prediction has the rest of the
        greater of bound and prediction left, and any other call at least one token."""
        tokens = sum(call.uncached_tokens for call in engine.prefills)
        margins: dict[int, int] = {}
        for known in engine.running:
            call = known.item.call
            size = call.prompt_tokens.bit_length()
            if size not in margins:
                margins[size] = max(self._bound.margin(call.prompt_tokens), 0)
            upper = call.output_predicted + margins[size]
            if call.output_upper > upper:
                upper = call.output_upper
            tokens += upper - known.output_tokens if upper > known.output_tokens else 1
        return tokens

    def _upper(self, call: Call) -> int:
        """The calibrated bound, or what the gateway sent with the call if that is greater."""
        return max(self._bound.upper(call.prompt_tokens, call.output_predicted), call.output_upper)
