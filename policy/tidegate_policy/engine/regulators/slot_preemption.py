"""`slot-preemption`: a waiting call takes the place and the memory of a running call in the same step.

vLLM preempts only when a running call needs memory. This regulator preempts when the first waiting call cannot start, for
lack of a place or of memory, and a running call ranks behind it. A preemption repeats work, so it must pay: the waiting
call has a higher urgency level, or the time until it would finish, with the recomputation, is shorter than the work that
is left of the running call. A call that has made no progress since its last preemption is not preempted.
"""

from dataclasses import replace
from itertools import islice

from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
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
        places = plan.max_running - engine.running_count
        if places > 0 and engine.sizes.context_tokens + BLOCK_TOKENS <= engine.free_kv_tokens:
            return plan
        head = engine.head
        if head is None or (places > 0 and fits(engine, head, freed=0)):
            return plan
        taken: list[KnownCall] = []
        freed = 0
        for victim in islice(engine.victims(), MOST_VICTIMS):
            if victim.protected or not worthwhile(engine, head, victim):
                break
            taken.append(victim)
            places += 1
            freed += victim.kv_tokens
            if places > 0 and fits(engine, head, freed=freed):
                ids = tuple(call.call.id for call in taken)
                return replace(plan, preempt=plan.preempt + ids)
        return plan


def fits(engine: EngineSnapshot, head: QueuedRequest, *, freed: int) -> bool:
    """Whether `head` can start when `freed` tokens more are free. The prefix cache is asked only if it matters."""
    free = engine.free_kv_tokens + freed - BLOCK_TOKENS
    return engine.most_uncached_tokens(head) <= free or engine.uncached_tokens(head) <= free


def worthwhile(engine: EngineSnapshot, head: QueuedRequest, victim: KnownCall) -> bool:
    """Whether `head` should run in place of `victim`."""
    left = engine.left(victim)
    if engine.rank(head) >= engine.rank(left):
        return False
    if head.call.urgency != victim.call.urgency:
        return head.call.urgency < victim.call.urgency
    again_s = engine.cost.prefill_seconds(max(victim.kv_tokens, 1))
    return head.service_s + again_s < left.service_s
