"""`stage-awareness`: a prefill of a lower urgency level does not delay decodes of a higher level (Semantic Alg 2).

Two variants exist. `stage-awareness` protects the targets: a lower level's prefill gets no more tokens than the
time-per-output-token targets of the higher levels' decodes allow. `strict-stage-awareness` is the paper's rule: while a
call of a higher level decodes, no call of a lower level prefills. Within one level both leave the plan as it is.
"""

from dataclasses import replace
from itertools import islice

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.model import LEAST_URGENT

LEAST_CHUNK = 16
"""Tokens. A smaller chunk costs more step time than it is worth, so the prefill waits."""
MOST_STARTS = 64


class StageAwareness(Memoryless):
    """The variant that protects targets."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.with_target:
            return plan
        level = min(call.call.urgency for call, _ in engine.with_target)
        target_s = min(target_s for call, target_s in engine.with_target if call.call.urgency == level)
        chunk = prefill_tokens(engine, target_s)
        if chunk >= LEAST_CHUNK:
            return plan.at_most(step_tokens=chunk + engine.decode_count)
        return _without_lower_prefills(engine, plan, level)


class StrictStageAwareness(Memoryless):
    """The paper's variant."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        level = min([call.item.call.urgency for call in engine.decoding], default=LEAST_URGENT)
        return _without_lower_prefills(engine, plan, level) if level < LEAST_URGENT else plan


def prefill_tokens(engine: EngineSnapshot, step_s: float) -> int:
    """The prompt tokens that fit beside the decodes into a step of `step_s` seconds; 0 or less if none fit."""
    context = sum(call.kv_tokens for call in engine.decodes) if engine.cost.context_s else 0
    base_s = engine.cost.step_seconds(uncached=0, decodes=engine.decode_count, context=context)
    return int((step_s - base_s) / engine.cost.prefill_s)


def _without_lower_prefills(engine: EngineSnapshot, plan: StepPlan, level: int) -> StepPlan:
    """The plan with all prefills of levels below `level` (greater numbers) paused, running and waiting."""
    paused = [call.call.id for call in engine.prefills if call.call.urgency > level]
    for starts, item in enumerate(islice(engine.startable(), MOST_STARTS)):
        if item.call.urgency > level:
            plan = plan.at_most(starts=starts)
            break
    return replace(plan, paused=plan.paused.union(paused)) if paused else plan
