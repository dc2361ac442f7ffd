"""`stage-awareness`: a prefill of a lower urgency level does not delay decodes of a higher level (Semantic Alg 2).

Two variants exist. `stage-awareness` protects the targets: the prefills of a level get no more tokens than the
time-per-output-token targets of the decodes of all higher levels allow. `strict-stage-awareness` is the paper's rule: while
a call of a higher level decodes, no call of a lower level prefills. Neither holds back a prefill of the highest level that
decodes, or of a higher one.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import LEAST_CHUNK, EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.model import LEAST_URGENT

MOST_STARTS = 64


class StageAwareness(Memoryless):
    """The variant that protects targets."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.with_target:
            return plan
        highest = min(call.call.urgency for call, _ in engine.with_target)
        levels = _prefills_by_level(engine, plan)
        tokens = 0
        for level in sorted(levels):
            if level > highest:
                allowed = prefill_tokens(engine, _tightest_s(engine, level))
                if allowed < tokens + LEAST_CHUNK or (
                    allowed < tokens + levels[level] and _stands_before_a_higher_level(engine, plan, level)
                ):
                    return _without_lower_prefills(engine, plan, level - 1)
                if allowed < tokens + levels[level]:
                    plan = plan.at_most(step_tokens=allowed + engine.decode_tokens)
                    return _without_lower_prefills(engine, plan, level)
            tokens += levels[level]
        return plan


class StrictStageAwareness(Memoryless):
    """The paper's variant."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        level = engine.highest_level
        return _without_lower_prefills(engine, plan, level) if level < LEAST_URGENT else plan


def prefill_tokens(engine: EngineSnapshot, step_s: float) -> int:
    """The prompt tokens that fit beside the decodes into a step of `step_s` seconds; 0 or less if none fit."""
    context = sum(call.kv_tokens for call in engine.decodes) if engine.cost.context_s else 0
    base_s = engine.cost.step_seconds(uncached=0, decodes=engine.decode_count, context=context)
    return int((step_s - base_s) / engine.cost.prefill_s)


def _prefills_by_level(engine: EngineSnapshot, plan: StepPlan) -> dict[int, int]:
    """The prompt tokens that the step could compute, by urgency level: of running calls, and of calls that may start."""
    left = plan.max_step_tokens - engine.decode_tokens
    found: dict[int, int] = {}
    for level, tokens in _prefills(engine, plan):
        if left <= 0:
            break
        found[level] = found.get(level, 0) + min(tokens, left)
        left -= tokens
    return found


def _prefills(engine: EngineSnapshot, plan: StepPlan) -> Iterator[tuple[int, int]]:
    """The level and the prompt tokens of each prefill in the order in which a step gives them tokens."""
    for call in engine.prefills:
        if call.call.id not in plan.paused:
            yield call.call.urgency, call.uncached_tokens
    starts = min(max(engine.places(plan), 0), MOST_STARTS if plan.max_starts is None else plan.max_starts)
    for item in islice(engine.startable(), starts):
        yield item.call.urgency, engine.most_uncached_tokens(item)


def _stands_before_a_higher_level(engine: EngineSnapshot, plan: StepPlan, level: int) -> bool:
    """Whether a prefill of `level` gets tokens before one of a higher level, which a bound of the step would starve."""
    order = [found for found, _ in _prefills(engine, plan)]
    return level in order and any(found < level for found in order[order.index(level) :])


def _tightest_s(engine: EngineSnapshot, level: int) -> float:
    """The least target of the decodes of higher levels than `level` (smaller numbers)."""
    return min((target_s for call, target_s in engine.with_target if call.call.urgency < level), default=math.inf)


def _without_lower_prefills(engine: EngineSnapshot, plan: StepPlan, level: int) -> StepPlan:
    """The plan with all prefills of levels below `level` (greater numbers) paused, running and waiting."""
    paused = [call.call.id for call in engine.prefills if call.call.urgency > level]
    for starts, item in enumerate(islice(engine.startable(), MOST_STARTS)):
        if item.call.urgency > level:
            plan = plan.at_most(starts=starts)
            break
    return replace(plan, paused=plan.paused.union(paused)) if paused else plan
