"""`slack-chunks`: the tokens of a step follow the slack of the calls that decode.

A call with a target for its time per output token has slack: the seconds by which it is ahead of the schedule
`first token + target * tokens`. A step may last as long as the least slack allows, and never needs to be shorter than the
tightest target. Without such targets the plan stays as it is.
"""

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.regulators.stage_awareness import prefill_tokens
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan


class SlackChunks(Memoryless):
    """The regulator."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.with_target:
            return plan
        now = engine.now
        allowed = [
            max(call.first_at_s + target_s * call.output_tokens - now, target_s)
            for call, target_s in engine.with_target
            if call.first_at_s is not None
        ]
        if not allowed:
            return plan
        tokens = max(prefill_tokens(engine, min(allowed)), 0) + engine.decode_tokens
        return plan.at_most(step_tokens=tokens)
