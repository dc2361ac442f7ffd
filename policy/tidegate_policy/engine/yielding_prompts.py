"""How an engine computes the prompts of a tenant that floods the pool, and long ones of a tenant that sends more than its
part (`Call.yields`, decisions 29 and 52).

A first token waits for the step that runs when its call arrives, and for its own step. A step that is full of another
tenant's prompts takes many times the fixed time of a step. So a step computes few tokens of prompts that yield, and none of
them beside the prompt of another call, unless that one has been partly computed before. Two steps in a row never pause
these prompts, so they always make progress.

This rule has no setting: it acts on calls that the gateway has marked, and there are none while all tenants keep to their
parts.
"""

from collections.abc import Sequence
from dataclasses import replace

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.policies import QueuedRequest

CHUNK_STEPS = 2.0
"""The tokens of yielding prompts in a step take so many times the fixed time of a step. With 1 the flooding tenant is
served less; with 3 the first tokens of others wait longer (decision 29)."""
MOST_STARTS = 32
"""Waiting calls that a step looks at."""


class YieldingPrompts(Memoryless):
    """The rule. It is shaped like a regulator and runs before the regulators."""

    def __init__(self) -> None:
        self._paused = False
        """Whether the last step paused prompts."""

    def skip(self) -> None:
        """A step begins to which the rule does not apply."""
        self._paused = False

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        paused_before, self._paused = self._paused, False
        yielding = [known.call.id for known in engine.prefills if known.call.yields]
        first = engine.first(MOST_STARTS)
        ahead = next((place for place, item in enumerate(first) if item.call.yields), len(first))
        if 0 < ahead < engine.waiting:  # those behind are not known to yield no prompt
            plan = plan.at_most(starts=ahead)
        if not yielding and (ahead or not first):
            return plan
        others = ahead > 0 or len(engine.prefills) > len(yielding)
        alone = engine.running_count == len(yielding)  # a step must compute something
        self._paused = bool(yielding) and others and not alone and not paused_before
        if self._paused:
            plan = plan.at_most(starts=ahead) if first else plan
            return replace(plan, paused=plan.paused.union(yielding))
        chunk = engine.chunk(CHUNK_STEPS)
        if alone and ahead:  # the other calls start beside them
            return plan.at_most(call_tokens=chunk)
        computing = sum(known.uncached_tokens for known in engine.prefills)
        starts = _starts(engine, first, chunk - computing if yielding else chunk)
        tokens = chunk + engine.decode_tokens
        if not yielding:  # a call that starts now comes behind all prompts that are partly computed
            tokens += computing
        return plan.at_most(running=engine.running_count + engine.reserved_places + starts, step_tokens=tokens)


def _starts(engine: EngineSnapshot, first: Sequence[QueuedRequest], chunk: int) -> int:
    """The waiting calls whose prompts fit into so many tokens of a step; one at least. Many short prompts would else start
    one by one, and places in the batch would stay empty."""
    count = 0
    for item in first:
        chunk -= engine.most_uncached_tokens(item)
        if chunk < 0:
            break
        count += 1
    return max(count, 1)
