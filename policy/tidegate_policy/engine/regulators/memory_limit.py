"""`memory-limit`: the tokens of a step follow the memory that is free or can be reclaimed (AugServe eq 27-32).

`budget = free + gamma * held`, in tokens, clamped to a band around the engine's own limit. The paper profiles that limit
offline; here it is `--max-num-batched-tokens`, with which the operator has sized the engine.
"""

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan

RECLAIMABLE = 1.0
"""The paper's gamma: the share of held memory that counts as available."""
LEAST, MOST = 0.25, 1.0
"""The paper's beta_low and beta_high: the band, as shares of the engine's limit."""


class MemoryLimit(Memoryless):
    """The regulator."""

    SAFETY = True

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        available = engine.free_kv_tokens + RECLAIMABLE * engine.pinned_kv_tokens
        limit = engine.limits.max_step_tokens
        budget = round(min(max(available, LEAST * limit), MOST * limit))
        return plan.at_most(step_tokens=budget)
