"""Prompts leave each step the tokens of the calls that decode.

vLLM gives the tokens of a step to the running calls in the order of their starts. A prompt that is partly computed takes
all that is left, so calls behind it in this order get nothing until it ends. In vLLM alone no call decodes behind such a
prompt, because none starts while it fills the steps. The rules for marked calls let others start beside it.
"""

from typing import TYPE_CHECKING

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan

if TYPE_CHECKING:
    from tidegate_policy.model import CallId


class DecodesFirst(Memoryless):
    """The rule. It is shaped like a regulator and runs after the other rules for marked calls."""

    def __init__(self) -> None:
        self._slowed: set[CallId] = set()
        """The prompts behind which calls may have started, because another rule slowed them."""
        self._marked = False

    def applies(self, *, marked: bool) -> bool:
        """Whether the rule applies to the next step. `marked` calls are in the engine."""
        self._marked = marked
        return marked or bool(self._slowed)

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        computing = {known.call.id for known in engine.prefills}
        self._slowed = computing if self._marked else self._slowed & computing
        prompts = [known.uncached_tokens for known in engine.prefills if known.call.id not in plan.paused]
        if not prompts or not self._slowed or not engine.decode_count:
            return plan
        share = max_min_share(plan.max_step_tokens - engine.decode_tokens, prompts)
        return plan if share is None else plan.at_most(call_tokens=share)


def max_min_share(tokens: int, wanted: list[int]) -> int | None:
    """The greatest bound under which all together get at most so many tokens, one each at least; None if they want no
    more."""
    for place, each in enumerate(sorted(wanted)):
        share = max(tokens // (len(wanted) - place), 1)
        if each > share:
            return share
        tokens -= each
    return None
