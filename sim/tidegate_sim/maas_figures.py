"""The figures of one run of a shared service, from its trace and its outcome (H-MAS, appendix B.2 and section 4).

A call belongs to the window and to the phase in which it arrives. A call that was shed, or that never produced a token,
missed its targets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tidegate_policy import window
from tidegate_sim import bench_report, cell
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

WINDOW_S = 30.0
"""The length of the windows in which the oracle chooses a policy."""
MISMATCH_S = 10.0
"""The sliding window of the mismatch score."""
INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Weights of a token in ESG (appendix B.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One call with what came of it."""

    call: TraceCall
    ttft_met: bool
    met: bool
    """Both targets were met (eq 8)."""
    gain: float
    """Its term of ESG (eq 6)."""
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    """Infinite for a call without a token."""

    @property
    def worth(self) -> float:
        """The greatest gain that the call could give."""
        return worth(self.call)


def figures(calls: Sequence[TraceCall], outcome: cell.Outcome, length_s: float) -> Report:
    """All figures of one run of a trace of `length_s` seconds."""
    outcomes = {item.id: item for item in outcome.calls}
    served = [_served(call, outcomes[call.id]) for call in calls]
    started = [each for each in served if each.ttft_s < math.inf]
    phases = [_attainment(served, index * length_s / 3, (index + 1) * length_s / 3) for index in range(3)]
    scores = _mismatches(calls, outcome, length_s)
    return {
        "calls": len(calls),
        "attainment": fmean(each.met for each in served),
        "goodput": sum(each.met for each in served) / length_s,
        "ttft_compliance": fmean(each.ttft_met for each in served),
        "ttft_95_s": bench_report.attained_s([each.ttft_s for each in started], 0.95) if started else 0.0,
        "tpot_95_s": bench_report.attained_s([each.tpot_s for each in started], 0.95) if started else 0.0,
        "esg": sum(each.gain for each in served) / sum(each.worth for each in served),
        "mismatch": fmean(scores),
        "mismatch_95": bench_report.attained_s(scores, 0.95),
        "phases": phases,
        "drop": 1 - phases[2] / max(phases[0], 1e-9),
        "recovery": phases[2] / max(phases[1], 1e-9),
        "switches_an_hour": len(outcome.switches) * 3600 / length_s,
        "preemptions": outcome.preemptions,
        "switches": [f"{at_s:.0f} s {policy}: {reason}" for at_s, policy, reason in outcome.switches],
        "met_by_window": _met_by_window(served, length_s),
    }


def worth(call: TraceCall) -> float:
    """The base value of a call: its weighted tokens (eq 6)."""
    return INPUT_WEIGHT * call.prompt_tokens + OUTPUT_WEIGHT * call.output_tokens


def _served(call: TraceCall, outcome: cell.CallOutcome) -> Served:
    if outcome.first_at_s is None or outcome.finished_at_s is None:
        return Served(call=call, ttft_met=False, met=False, gain=0.0)
    ttft_slo_s, tpot_slo_s = (call.ttft_slo_ms or math.inf) / 1000, (call.tpot_slo_ms or math.inf) / 1000
    ttft_s = outcome.first_at_s - outcome.arrived_at_s
    tpot_s = window.tpot(outcome.finished_at_s, first_at_s=outcome.first_at_s, tokens=call.output_tokens) or 0.0
    slo_s = ttft_slo_s + call.output_tokens * tpot_slo_s
    ttft_met = ttft_s <= ttft_slo_s
    return Served(
        call=call,
        ttft_met=ttft_met,
        met=ttft_met and tpot_s <= tpot_slo_s,
        gain=worth(call) * min(1.0, slo_s / (ttft_s + call.output_tokens * tpot_s)),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


def _attainment(served: Sequence[Served], from_s: float, to_s: float) -> float:
    """The share of the calls that arrive in [from_s, to_s) and meet their targets."""
    return fmean([each.met for each in served if from_s <= each.call.arrival_s < to_s] or [0.0])


def _met_by_window(served: Sequence[Served], length_s: float) -> list[int]:
    met = [0] * math.ceil(length_s / WINDOW_S)
    for each in served:
        met[min(int(each.call.arrival_s // WINDOW_S), len(met) - 1)] += each.met
    return met


def _mismatches(calls: Sequence[TraceCall], outcome: cell.Outcome, length_s: float) -> list[float]:
    """The mismatch score (eq 7) at each second of the trace, over the `MISMATCH_S` before it.

    The tokens of a prompt count as served evenly from the start of the call to its first token, those of the answer evenly
    from there to its end."""
    seconds = math.ceil(length_s)
    arrived, served = [0.0] * seconds, [0.0] * seconds
    sizes = {call.id: call for call in calls}
    for call in calls:
        arrived[min(int(call.arrival_s), seconds - 1)] += call.prompt_tokens + call.output_tokens
    for item in outcome.calls:
        if item.started_at_s is None or item.first_at_s is None or item.finished_at_s is None:
            continue
        _spread(served, sizes[item.id].prompt_tokens, item.started_at_s, item.first_at_s)
        _spread(served, item.output_tokens, item.first_at_s, item.finished_at_s)
    size = int(MISMATCH_S)
    return [
        max(0.0, sum(arrived[end - size : end]) / (sum(served[end - size : end]) + 1.0) - 1.0)
        for end in range(size, seconds + 1)
    ]


def _spread(served: list[float], tokens: float, from_s: float, to_s: float) -> None:
    """Adds `tokens` evenly to the seconds of [from_s, to_s)."""
    rate = tokens / max(to_s - from_s, 1e-9)
    for second in range(int(from_s), min(math.ceil(to_s), len(served))):
        served[second] += rate * (min(to_s, second + 1) - max(from_s, second))
