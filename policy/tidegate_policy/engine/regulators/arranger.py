"""`arranger`: whether the next step admits waiting calls, or only continues the calls that run (RelServe section 4.3).

Three situations follow from the best waiting call and the best decoding call (eq 14). If the waiting call goes first, it is
admitted. If both belong to one group, the rest of the group is admitted. Otherwise the running group is about to finish,
and the sign of the change in total latency decides (eq 15-17). A candidate batch holds calls of one group.

The paper's engine pauses all decodes for a prefill batch. With chunked prefill both share a step, so a prefill delays the
decodes only by its own tokens (`prefill_s` times the tokens), and the fixed step time is paid once for both.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
from tidegate_policy.model import Call
from tidegate_policy.policies import QueuedRequest

MOST_CANDIDATES = 64
"""Waiting calls that one step looks at."""


class Arranger(Memoryless):
    """The regulator."""

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        places = engine.places(plan)
        if places <= 0 or not engine.waiting or not engine.decode_count:
            return plan
        candidate = _candidate(engine, islice(engine.startable(), min(places, MOST_CANDIDATES)))
        if not candidate:
            return plan
        if _lowers_latency(engine, candidate) or _goes_first(engine, candidate[0]):
            return plan.at_most(starts=len(candidate))
        return plan.at_most(starts=0)


def _lowers_latency(engine: EngineSnapshot, candidate: list[QueuedRequest]) -> bool:
    """Whether `added_latency_s` is negative. The prefix cache is asked only if it matters."""
    latency_s = _added_latency(engine, engine.decoding, candidate)
    return latency_s(sum([engine.most_uncached_tokens(item) for item in candidate])) < 0 or (
        latency_s(len(candidate)) < 0 and latency_s(sum([engine.uncached_tokens(item) for item in candidate])) < 0
    )


def _goes_first(engine: EngineSnapshot, waiting: QueuedRequest) -> bool:
    """Whether a waiting call ranks before the best decoding call, or belongs to its group."""
    best, rank = engine.first_decode()
    return group_of(best.call) == group_of(waiting.call) or engine.rank(waiting) < rank


def added_latency_s(engine: EngineSnapshot, decodes: list[KnownCall], candidate: list[QueuedRequest]) -> float:
    """The change in the total latency of all groups if the candidate is prefilled now (eq 15-17), in seconds."""
    return _added_latency(engine, decodes, candidate)(sum([engine.uncached_tokens(item) for item in candidate]))


def _added_latency(
    engine: EngineSnapshot, decodes: list[KnownCall], candidate: list[QueuedRequest]
) -> Callable[[int], float]:
    """`added_latency_s` by the uncached tokens of the candidate, with which it rises."""
    groups: dict[str, int] = {}
    for known in decodes:
        call = known.item.call
        group, left = call.group or call.id, call.output_left(known.output_tokens)
        if left > groups.get(group, 0):
            groups[group] = left
    output = max([item.call.output_left(0) for item in candidate])
    slower_s = engine.cost.decode_s * len(candidate) * sum([min(left, output) for left in groups.values()])
    waiting_groups = max(engine.live_groups - len(groups), 1)
    saved_s = waiting_groups * engine.cost.step_s * min(output, max(groups.values()))
    return lambda tokens: engine.cost.prefill_s * tokens * len(groups) + slower_s - saved_s


def group_of(call: Call) -> str:
    """The group of a call; a call without one is a group of its own."""
    return call.group or call.id


def _candidate(engine: EngineSnapshot, waiting: Iterable[QueuedRequest]) -> list[QueuedRequest]:
    """The leading waiting calls of one group that fit into one step together."""
    taken: list[QueuedRequest] = []
    tokens = 0
    for item in waiting:
        tokens += item.call.prompt_tokens
        if taken and (group_of(item.call) != group_of(taken[0].call) or tokens > engine.limits.max_step_tokens):
            break
        taken.append(item)
    return taken
