"""Chats whose words are read as they come, beside summaries of long documents: a mix of targets for time per output token.

Lengths of chats are log-normal with the means and deviations of the logarithms of 19,366 calls of the published Azure
conversation trace of 2023 (prompt 6.63 and 0.99, answer 5.02 and 0.86), within the range of that trace. The targets are
those of H-MAS Table 6 for dialogue and for summarization. The share of summaries and the lengths of their documents are
assumptions.
"""

import math
import random

from tidegate_sim.trace_format import TraceCall

CHAT, SUMMARY = "dialogue", "summarization"
SUMMARY_SHARE = 0.15
CHAT_URGENCY, SUMMARY_URGENCY = 1, 3
TTFT_S = {CHAT: 4.0, SUMMARY: 7.0}
TPOT_S = {CHAT: 0.07, SUMMARY: 0.11}


def trace(rng: random.Random, *, calls: int, rate: float) -> list[TraceCall]:
    """`calls` calls, Poisson at `rate` a second."""
    made: list[TraceCall] = []
    arrival_s = 0.0
    for number in range(calls):
        arrival_s += rng.expovariate(rate)
        kind = SUMMARY if rng.random() < SUMMARY_SHARE else CHAT
        prompt, output = _lengths(rng, kind)
        made.append(
            TraceCall(
                id=f"c{number}",
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                output_tokens=output,
                tenant=kind,
                task_type=kind,
                urgency=CHAT_URGENCY if kind == CHAT else SUMMARY_URGENCY,
                ttft_slo_ms=1000 * TTFT_S[kind],
                tpot_slo_ms=1000 * TPOT_S[kind],
            )
        )
    return made


def _lengths(rng: random.Random, kind: str) -> tuple[int, int]:
    if kind == CHAT:
        return _log_normal(rng, 760.0, 0.99, 16, 4200), _log_normal(rng, 150.0, 0.86, 2, 1000)
    return _log_normal(rng, 8000.0, 0.6, 3000, 24000), _log_normal(rng, 250.0, 0.4, 50, 600)


def _log_normal(rng: random.Random, median: float, deviation: float, low: int, high: int) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), deviation)), low), high)
