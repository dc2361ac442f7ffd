"""`stage-awareness`: a prefill of a lower urgency level does not delay decodes of a higher level (Semantic Alg 2).

Two variants exist. `stage-awareness` protects the targets: a lower level's prefill gets no more tokens than the
time-per-output-token targets of the higher levels' decodes allow. `strict-stage-awareness` is the paper's rule: while a
call of a higher level decodes, no call of a lower level prefills. Within one level both leave the plan as it is.
"""

from dataclasses import replace

from tidegate_policy.engine.regulators.regulator import Memoryless, fewer_starts
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import RunningCall, StepPlan

LEAST_CHUNK = 16
"""Tokens. A smaller chunk costs more step time than it is worth, so the prefill waits."""
MOST_STARTS = 64


class StageAwareness(Memoryless):
    """The variant that protects targets."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        decodes = [call for call in engine.running if call.decodes]
        guarded = self._guarded(decodes)
        if not guarded:
            return plan
        level, target_s = guarded
        chunk = prefill_tokens(engine, decodes, target_s)
        if chunk >= LEAST_CHUNK:
            return replace(plan, max_step_tokens=min(plan.max_step_tokens, chunk + len(decodes)))
        return _without_lower_prefills(engine, plan, level)

    def _guarded(self, decodes: list[RunningCall]) -> tuple[int, float] | None:
        """The level below which prefills are bounded, and the tightest target of the decodes up to that level."""
        with_target = [call for call in decodes if call.call.tpot_s is not None]
        if not with_target:
            return None
        level = min(call.call.urgency for call in with_target)
        targets = [call.call.tpot_s or 0.0 for call in with_target if call.call.urgency == level]
        return level, min(targets)


class StrictStageAwareness(Memoryless):
    """The paper's variant."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        levels = [call.call.urgency for call in engine.running if call.decodes]
        return _without_lower_prefills(engine, plan, min(levels)) if levels else plan


def prefill_tokens(engine: EngineSnapshot, decodes: list[RunningCall], step_s: float) -> int:
    """The prompt tokens that fit beside the decodes into a step of `step_s` seconds; 0 or less if none fit."""
    context = sum(call.kv_tokens for call in decodes)
    base_s = engine.cost.step_seconds(uncached=0, decodes=len(decodes), context=context)
    return int((step_s - base_s) / engine.cost.prefill_s)


def _without_lower_prefills(engine: EngineSnapshot, plan: StepPlan, level: int) -> StepPlan:
    """The plan with all prefills of levels below `level` (greater numbers) paused, running and waiting."""
    paused = [call.call.id for call in engine.running if not call.decodes and call.call.urgency > level]
    starts = 0
    for item in engine.first(MOST_STARTS):
        if item.call.urgency > level:
            break
        starts += 1
    bounded = starts < min(engine.waiting, MOST_STARTS)
    return replace(
        plan,
        paused=plan.paused.union(paused),
        max_starts=fewer_starts(plan, starts) if bounded else plan.max_starts,
    )
