"""`slot-preemption`: a waiting call takes the place and the memory of a running call in the same step.

vLLM preempts only when a running call needs memory. This regulator preempts when the first waiting call cannot start, for
lack of a place or of memory, and a running call ranks behind it. A preemption repeats work, so it must pay: the waiting
call has a higher urgency level, or the time until it would finish, with the recomputation of all calls that yield, is
shorter than the work that is left of the running call. Memory that a call shares with others does not become free when it
yields, so it does not count. A call that has made no progress since its last preemption is not preempted.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.model import CallId
from tidegate_policy.policies import QueuedRequest

MOST_VICTIMS = 8
"""Preemptions of one step."""
BLOCK_TOKENS = 16
"""Memory beyond its prompt that a call needs to start."""


class SlotPreemption(Memoryless):
    """The regulator."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        if not engine.running_count or plan.max_starts == 0:
            return plan
        places = engine.places(plan)
        if places > 0 and engine.sizes.context_tokens + BLOCK_TOKENS <= engine.free_kv_tokens:
            return plan
        head = engine.head
        if head is None or (places > 0 and fits(engine, head, freed=0)):
            return plan
        taken = yielding(engine, head, places, islice(worthwhile(engine, head), MOST_VICTIMS))
        return replace(plan, preempt=plan.preempt + taken) if taken else plan


def fits(engine: EngineSnapshot, head: QueuedRequest, *, freed: int) -> bool:
    """Whether `head` can start when `freed` tokens more are free. The prefix cache is asked only if it matters."""
    free = engine.free_kv_tokens + freed - BLOCK_TOKENS
    return engine.most_uncached_tokens(head) <= free or engine.memory_tokens(head) <= free


def worthwhile(engine: EngineSnapshot, head: QueuedRequest) -> Iterator[CallId]:
    """The running calls for whose places and memory an exchange with `head` pays, the first to yield first."""
    again_s = 0.0
    shortest_s = math.inf  # the least work that is left of a call of the level of `head`
    rank = engine.rank(head)
    for known, left, victims_rank in engine.victims():
        if known.protected or rank >= victims_rank or head.call.urgency > left.call.urgency:
            return
        again_s += engine.cost.prefill_seconds(max(known.kv_tokens, 1))
        if head.call.urgency == left.call.urgency:
            shortest_s = min(shortest_s, left.service_s)
        if head.service_s + again_s >= shortest_s:
            return
        yield left.call.id


def yielding(engine: EngineSnapshot, head: QueuedRequest, places: int, victims: Iterable[CallId]) -> tuple[CallId, ...]:
    """The first of these running calls, in whose place `head` can run; none if it cannot start then. `places` are free now;
    a negative number means that calls must leave first."""
    taken: list[CallId] = []
    freed = 0
    for victim in victims:
        taken.append(victim)
        places += 1
        missing = engine.most_uncached_tokens(head) + BLOCK_TOKENS - engine.free_kv_tokens - freed
        if missing > 0:
            freed += engine.own_kv_tokens(victim, enough=missing)
        if places > 0 and fits(engine, head, freed=freed):
            return tuple(taken)
    return ()
