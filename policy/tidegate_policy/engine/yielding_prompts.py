"""How an engine computes the prompts of a tenant that floods the pool (`Call.yields`, decision 29).

A first token waits for the step that runs when its call arrives, and for its own step. A step that is full of another
tenant's prompts takes many times the fixed time of a step. So a step computes few tokens of prompts that yield, and none of
them beside the prompt of another call. Two steps in a row never pause these prompts, so they always make progress.

This rule has no setting: it acts on calls that the gateway has marked, and there are none while no tenant floods the pool.
"""

from dataclasses import replace

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan

CHUNK_STEPS = 2.0
"""The tokens of yielding prompts in a step take so many times the fixed time of a step. With 1 the flooding tenant is
served less; with 3 the first tokens of others wait longer (decision 29)."""
LEAST_CHUNK = 16
"""Tokens."""


class YieldingPrompts(Memoryless):
    """The rule. It is shaped like a regulator and runs before the regulators."""

    def __init__(self) -> None:
        self._paused = False
        """Whether the last step paused prompts."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        yielding = [known.call.id for known in engine.prefills if known.call.yields]
        head = engine.head
        if not yielding and (head is None or not head.call.yields):
            return plan
        others = len(engine.prefills) > len(yielding) or (head is not None and not head.call.yields)
        alone = engine.running_count == len(yielding)  # a step must compute something
        self._paused = bool(yielding) and others and not alone and not self._paused
        if self._paused:
            return replace(plan, paused=plan.paused.union(yielding))
        chunk = max(round(CHUNK_STEPS * engine.cost.step_s / engine.cost.prefill_s), LEAST_CHUNK)
        decodes = engine.decode_count * engine.limits.tokens_per_sequence
        return plan.at_most(running=engine.running_count + 1, step_tokens=decodes + chunk)
