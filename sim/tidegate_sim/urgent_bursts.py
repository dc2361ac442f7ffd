"""Bursts of calls of five urgency levels (Semantic Scheduling, section 4.1).

Bursts come at a fixed gap, and a burst has 1 to N calls. Levels are uniform. The paper draws on short conversations with an
emergency service and allows 500 output tokens. It publishes no lengths. Prompts have the length of 160 published triage
scenarios in five levels (median 74 tokens). Outputs are log-normal with the deviation of 17,543 first answers of published
conversations, cut at 500 tokens (1.02). Their median is shorter, because the paper's longest bucket begins near 50 tokens.
Prompts share no prefix: the paper measured 0.1 shared tokens.
"""

import math
import random

from tidegate_sim.trace_format import TraceCall

LEVELS = 5
MOST_OUTPUT_TOKENS = 500
PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_RANGE = 74.0, 0.3, (20, 300)
OUTPUT_MEDIAN, OUTPUT_SPREAD = 60.0, 1.0
TTFT_TARGETS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""By level. The paper states no targets."""


def trace(rng: random.Random, *, calls: int, gap_s: float | None, rate: float, largest: int) -> list[TraceCall]:
    """`calls` calls in bursts of 1 to `largest`. Bursts are `gap_s` apart; with None they are Poisson, so that `rate` calls
    come a second."""
    made: list[TraceCall] = []
    arrival_s = 0.0
    while len(made) < calls:
        for _ in range(min(rng.randint(1, largest), calls - len(made))):
            level = rng.randrange(LEVELS)
            prompt = round(rng.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SPREAD))
            output = round(rng.lognormvariate(math.log(OUTPUT_MEDIAN), OUTPUT_SPREAD))
            made.append(
                TraceCall(
                    id=f"c{len(made)}",
                    arrival_s=arrival_s,
                    prompt_tokens=min(max(prompt, PROMPT_RANGE[0]), PROMPT_RANGE[1]),
                    output_tokens=min(max(output, 1), MOST_OUTPUT_TOKENS),
                    urgency=level,
                    ttft_slo_ms=1000 * TTFT_TARGETS_S[level],
                )
            )
        arrival_s += gap_s if gap_s is not None else rng.expovariate(2 * rate / (1 + largest))
    return made
