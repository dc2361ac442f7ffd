"""`prefill-order`: of the prompts that a step could compute, the one that goes first by the policy is computed first.

vLLM gives the tokens of a step to running calls before it starts a waiting one. So a call with a long prompt of which a
part has been computed keeps every prompt behind it waiting, whatever the policy says. This regulator pauses such a prompt
while a better one can be computed: one that runs, or one that waits and can start now. A paused prompt keeps its memory. It
gives way to at most as many tokens as it must still compute itself, so it ends after at most twice its own time.

It is the order among prefills of `scheduling.md`, section 6, and no paper has it: RelServe and Semantic Scheduling compute
each prompt in one step.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.regulators.slot_preemption import fits
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.policies import Key, QueuedRequest

if TYPE_CHECKING:
    from tidegate_policy.model import CallId


class PrefillOrder(Memoryless):
    """The regulator."""

    def __init__(self) -> None:
        self._given: dict[CallId, int] = {}
        """The tokens to which each partly computed prompt has given way."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.prefills:
            self._given.clear()
            return plan
        self._given = {call.call.id: self._given.get(call.call.id, 0) for call in engine.prefills}
        prefills = [call for call in engine.prefills if call.call.id not in plan.paused]
        if not prefills:
            return plan
        best, tokens = self._best(engine, plan, prefills)
        first = _order(engine, best)
        paused = []
        for call in prefills:
            left = call.uncached_tokens
            if call.call.id == best.call.id or _order(engine, engine.left(call)) <= first:
                continue
            if self._given[call.call.id] + tokens <= left:
                self._given[call.call.id] += tokens
                paused.append(call.call.id)
        return replace(plan, paused=plan.paused.union(paused)) if paused else plan

    def _best(self, engine: EngineSnapshot, plan: StepPlan, prefills: list[KnownCall]) -> tuple[QueuedRequest, int]:
        """The prompt that goes first by the policy, and the tokens of it that the step would compute."""
        room = max(plan.max_step_tokens - engine.decode_tokens, 1)
        best, tokens = min(
            ((engine.left(call), call.uncached_tokens) for call in prefills), key=lambda found: _order(engine, found[0])
        )
        head = engine.head if engine.places(plan) > 0 and plan.max_starts != 0 else None
        if head is not None and _order(engine, head) < _order(engine, best) and fits(engine, head, freed=0):
            best, tokens = head, engine.uncached_tokens(head)
        return best, min(tokens, room)


def _order(engine: EngineSnapshot, item: QueuedRequest) -> tuple[int, Key]:
    """The least goes first: among waiting calls too, the policy orders the calls of one turn."""
    return item.call.turn, engine.rank(item)
