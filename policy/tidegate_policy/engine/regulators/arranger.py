"""`arranger`: whether the next step admits waiting calls, or only continues the calls that run (RelServe section 4.3).

Three situations follow from the best waiting call and the best decoding call (eq 14). If the waiting call goes first, it is
admitted. If both belong to one group, the rest of the group is admitted. Otherwise the running group is about to finish,
and the sign of the change in total latency decides (eq 15-17). A candidate batch holds calls of one group.

The paper's engine pauses all decodes for a prefill batch. With chunked prefill both share a step, so a prefill delays the
decodes only by its own tokens (`prefill_s` times the tokens), and the fixed step time is paid once for both.
"""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from tidegate_policy.engine.call_census import group_of
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepPlan
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


class _Groups(NamedTuple):
    """The groups of the calls that decode."""

    number: int
    delayed_tokens: int
    """The output tokens that come while the candidate decodes too: of each group those of its longest call."""
    longest: int
    """The most output tokens that a call has left."""


def _lowers_latency(engine: EngineSnapshot, candidate: list[QueuedRequest]) -> bool:
    """Whether the candidate adds less than 0 s of latency. It looks at one call that decodes if the answer is clear then,
    and asks the prefix cache only if it matters."""
    output = _output(engine, candidate)
    most_tokens = sum([engine.most_uncached_tokens(item) for item in candidate])
    if _latency_s(engine, _worst_groups(engine, output), candidate, output, most_tokens) < 0:
        return True
    groups = _groups(engine, engine.decoding, output)
    return _latency_s(engine, groups, candidate, output, most_tokens) < 0 or (
        _latency_s(engine, groups, candidate, output, len(candidate)) < 0
        and _latency_s(engine, groups, candidate, output, _uncached(engine, candidate)) < 0
    )


def _goes_first(engine: EngineSnapshot, waiting: QueuedRequest) -> bool:
    """Whether a waiting call ranks before the best decoding call, or belongs to its group."""
    group = group_of(waiting.call)
    if all(group_of(known.call) != group for known in engine.decoding):
        return engine.goes_before_decodes(waiting)
    best, rank = engine.first_decode()
    return group_of(best.call) == group or engine.rank(waiting) < rank


def _latency_s(
    engine: EngineSnapshot, groups: _Groups, candidate: list[QueuedRequest], output: int, tokens: int
) -> float:
    """The change in the total latency of all groups, in seconds, if the candidate with so many uncached tokens is
    prefilled now (eq 15-17). It rises with these tokens, with the number of groups and with their delayed tokens, and falls
    with the longest call. This holds exactly, because rounding keeps the order."""
    cost = engine.cost
    slower_s = cost.decode_s * len(candidate) * groups.delayed_tokens
    saved_s = max(engine.live_groups - groups.number, 1) * cost.step_s * min(output, groups.longest)
    return cost.prefill_s * tokens * groups.number + slower_s - saved_s


def _groups(engine: EngineSnapshot, decodes: list[KnownCall], output: int) -> _Groups:
    """The groups of these calls beside a candidate of `output` tokens."""
    longest: dict[str, int] = {}
    calls = [known.item.call for known in decodes]
    for call, done in zip(calls, engine.outputs_of([call.id for call in calls]), strict=True):
        group, left = call.group or call.id, call.output_predicted - done
        if left <= 0:
            left = call.output_left(done)
        if left > longest.get(group, 0):
            longest[group] = left
    return _Groups(len(longest), sum([min(left, output) for left in longest.values()]), max(longest.values()))


def _worst_groups(engine: EngineSnapshot, output: int) -> _Groups:
    """Groups for which `_latency_s` is at least that of the groups of the calls that decode."""
    known = engine.newest_decode
    return _Groups(engine.decode_count, engine.decode_count * output, known.item.call.output_left(known.output_tokens))


def _output(engine: EngineSnapshot, candidate: list[QueuedRequest]) -> int:
    """The most output tokens that a call of the candidate has left."""
    return max([engine.output_left(item) for item in candidate])


def _uncached(engine: EngineSnapshot, candidate: list[QueuedRequest]) -> int:
    """The tokens that the candidate must compute before it decodes."""
    return sum([engine.uncached_tokens(item) for item in candidate])


def _candidate(engine: EngineSnapshot, waiting: Iterable[QueuedRequest]) -> list[QueuedRequest]:
    """The leading waiting calls of one group that fit into one step together."""
    taken: list[QueuedRequest] = []
    tokens = 0
    for item in waiting:
        tokens += engine.most_uncached_tokens(item)
        if taken and (group_of(item.call) != group_of(taken[0].call) or tokens > engine.limits.max_step_tokens):
            break
        taken.append(item)
    return taken
