"""A call that goes first starts in the next steps (`Call.owed`, `Call.ahead`, decisions 52 to 54).

To go first is not enough in two cases:

- The memory is full of answers that grow, as those of a tenant that had the pool alone: the running calls take each block
  that becomes free before a waiting call finds enough of them. So if the first waiting call is owed a place and cannot
  start, running calls that are owed none yield: those that started last, which lose the least work. vLLM would soon
  preempt one in any case, for another one that needs memory. Others may take what they left (a call of another lane, or
  running calls that need a block in the same step), so more of them yield if the call has not started a few steps later.
  A call that is only ahead of long prompts takes no memory and no place of others.
- Other prompts fill the steps. So while a call that goes first waits or computes its prompt, every second step is for such
  calls and for decodes: the prompts of other calls pause, and no other call starts. In the other steps, and while such a
  call decodes, one other prompt gets a small part of each step: by turns the one that started first, and the shortest of
  those that run and the first that waits. Prompts that yield have a rule of their own (`yielding_prompts`).

This rule has no setting: it acts on calls that the gateway has marked. There are none while all tenants keep to their parts
and none of their prompts is long.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate_policy.engine.regulators import slot_preemption
from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import LEAST_CHUNK, EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.policies import QueuedRequest

if TYPE_CHECKING:
    from tidegate_policy.engine.known_call import KnownCall
    from tidegate_policy.model import CallId

MOST_STARTS = 32
"""Waiting calls that a step looks at."""
MOST_VICTIMS = 64
"""Calls that yield in one step: many short ones have the memory of one long prompt."""
AGAIN_STEPS = 4
"""Until others yield to the same call again."""
CHUNK_STEPS = 8.0
"""The tokens that a step computes of other prompts take so many times the fixed time of a step. With more, each token of
a call that goes first takes longer; with less, the fixed times take a greater part of the engine's time."""


class OwedCalls(Memoryless):
    """The rule. It is shaped like a regulator and runs before the regulators."""

    def __init__(self) -> None:
        self._served: CallId | None = None
        """The last waiting call to which others yielded."""
        self._since = 0
        """Steps since then."""
        self._apart = False
        """The last step was for calls that go first."""
        self._shortest = False
        """Of the other prompts the shortest has the next turn, not the one that started first."""

    def skip(self) -> None:
        """A step begins to which the rule does not apply."""
        self._apart, self._served = False, None

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        apart_before, self._apart = self._apart, False
        self._since += 1
        if not engine.running_count:
            return plan
        chunk = engine.chunk(CHUNK_STEPS)
        head = engine.head if plan.max_starts != 0 else None
        starting: list[QueuedRequest] = []
        if head is not None and head.call.goes_first:
            plan, can_start = self._with_room(engine, plan, head)
            starting = _short_ones(engine, chunk) if can_start else []
        prompts = [known for known in engine.prefills if not known.call.yields]
        first = [known for known in prompts if known.call.goes_first and known.uncached_tokens <= chunk]
        others = [known for known in prompts if not (known.call.goes_first and known.uncached_tokens <= chunk)]
        waits = bool(starting or first)
        if not (others or engine.waiting) or not (waits or any(known.call.goes_first for known in engine.decoding)):
            return plan
        nothing = engine.running_count == len(others)  # a step must compute something (`bounds`)
        if waits and not apart_before and not nothing:
            self._apart = True
            plan = plan.at_most(starts=len(starting), call_tokens=chunk)  # vLLM pauses no call with an adapter
            return replace(plan, paused=plan.paused.union([known.call.id for known in others]))
        if waits:  # half of the step is for them
            chunk = min(chunk, max((plan.max_step_tokens - engine.decode_tokens) // 2, LEAST_CHUNK))
        tokens = sum([known.uncached_tokens for known in first]) + sum(map(engine.most_uncached_tokens, starting))
        plan = plan.at_most(step_tokens=engine.decode_tokens + tokens + chunk, call_tokens=chunk)
        return self._with_one(engine, plan, others, starts=not waits) if others else plan

    def _with_one(self, engine: EngineSnapshot, plan: StepPlan, others: "list[KnownCall]", *, starts: bool) -> StepPlan:
        """The plan in which one of these prompts computes, so that the calls behind them get their tokens. With `starts` a
        shorter one that waits may start in its place."""
        self._shortest = not self._shortest
        one: KnownCall | None = others[0]
        if self._shortest:
            one = min(others, key=_uncached)
            head = engine.head if starts and engine.places(plan) > 0 and plan.max_starts != 0 else None
            shorter = head is not None and engine.most_uncached_tokens(head) < one.uncached_tokens
            alone = engine.running_count == len(others)  # a step must compute something (`bounds`)
            if head is not None and shorter and not alone and slot_preemption.fits(engine, head, freed=0):
                one = None
        paused = [known.call.id for known in others if known is not one]
        return replace(plan, paused=plan.paused.union(paused)) if paused else plan

    def _with_room(self, engine: EngineSnapshot, plan: StepPlan, head: QueuedRequest) -> tuple[StepPlan, bool]:
        """The plan in which others yield to `head`, if they must, and whether it can start then."""
        places = engine.places(plan)
        if places > 0 and slot_preemption.fits(engine, head, freed=0):
            return plan, True
        if not head.call.owed:
            return plan, False
        if head.call.id == self._served and self._since < AGAIN_STEPS:
            return plan, False
        self._served, self._since = head.call.id, 0
        latest = (known for known in reversed(engine.running) if not (known.protected or known.call.goes_first))
        ids = itertools.islice((known.call.id for known in latest), MOST_VICTIMS)
        taken = slot_preemption.yielding(engine, head, places, ids)
        return (replace(plan, preempt=plan.preempt + taken), True) if taken else (plan, False)


def _short_ones(engine: EngineSnapshot, chunk: int) -> list[QueuedRequest]:
    """The first waiting calls, as long as they go first and have at most so many tokens to compute."""
    found: list[QueuedRequest] = []
    for item in engine.first(MOST_STARTS):
        if not item.call.goes_first or engine.most_uncached_tokens(item) > chunk:
            break
        found.append(item)
    return found


def _uncached(known: "KnownCall") -> int:
    return known.uncached_tokens
