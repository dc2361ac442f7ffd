"""How many times longer than on an unloaded pool does a workflow take? The metric that users feel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_sim import cell
from tidegate_sim.trace_format import TraceCall

LEAST_ALONE_S = 5.0
"""A shorter time alone counts as this. While one prompt of 12,000 tokens is computed, an answer of ten tokens must wait for
seconds, which is many times its own time and few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How long a workflow, or a call without one, took. One that was shed never ends."""

    latency_s: float
    slowdown: float
    """The latency over the latency alone on the fastest engines, without caches, which is at least `LEAST_ALONE_S`."""


def of_outcome(calls: Sequence[TraceCall], outcome: cell.Outcome, models: Sequence[CostModel]) -> list[Slowdown]:
    """Of each workflow, or call without one, in order of arrival."""
    path_s: dict[str, float] = {}
    alone_s: dict[str, float] = {}
    for call in calls:
        own_s = min(model.alone_seconds(call.prompt_tokens, call.output_tokens) for model in models)
        path_s[call.id] = own_s + max((path_s[before] for before in call.after), default=0.0)
        group = call.workflow or call.id
        alone_s[group] = max(alone_s.get(group, 0.0), path_s[call.id])
    times = spans(outcome)
    found = []
    for group, least_s in alone_s.items():
        arrived_at_s, ended_at_s = times[group]
        latency_s = ended_at_s - arrived_at_s
        found.append(Slowdown(latency_s=latency_s, slowdown=latency_s / max(least_s, LEAST_ALONE_S)))
    return found


def spans(outcome: cell.Outcome) -> dict[str, tuple[float, float]]:
    """Of each workflow, or call without one: the arrival of its first call and the end of its last one, in seconds. The
    end is infinite if a call was shed."""
    found: dict[str, tuple[float, float]] = {}
    for item in outcome.calls:
        group = item.workflow or item.id
        arrived_at_s, ended_at_s = found.get(group, (math.inf, 0.0))
        end_s = math.inf if item.finished_at_s is None else item.finished_at_s
        found[group] = min(arrived_at_s, item.arrived_at_s), max(ended_at_s, end_s)
    return found
