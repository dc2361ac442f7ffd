"""Traces for autoscaling: chats whose number changes over an hour or more.

The lengths are log-normal with the medians and spreads of the Azure LLM inference trace 2023, conversations (19,366 calls:
prompts of 760 tokens at a spread of 0.99, answers of 151 tokens at 0.86, geometric means). The shapes of the load are
assumptions. `azure` and `azure-wave` take arrivals and lengths from the published file, which is never copied. Each trace
depends on its name, its seed and its load alone.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_sim import azure_suite
from tidegate_sim.trace_format import BadTrace, TraceCall

TTFT_S, TPOT_S = 2.0, 0.1
"""The targets of every call."""
PROMPT, OUTPUT = (math.log(760), 0.99), (math.log(151), 0.86)
"""Mean and standard deviation of the logarithm of a length."""
LONGEST_PROMPT, LONGEST_OUTPUT = 8000, 1000
HOUR_S = 3600.0
FROM_AZURE = ("azure", "azure-wave")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the load changes, as a multiple of the base load."""

    length_s: float
    load: Callable[[float, random.Random], Callable[[float], float]]
    """Takes the length and a source of randomness, and returns the load at each instant."""


def _day(length_s: float, rng: random.Random) -> Callable[[float], float]:
    """One wave from 0.2 to 1.8, with noise from minute to minute, as a day has it."""
    noise = [math.exp(rng.gauss(0, 0.15)) for _ in range(math.ceil(length_s / 60) + 1)]
    return lambda at_s: (1 - 0.8 * math.cos(2 * math.pi * at_s / length_s)) * noise[int(at_s // 60)]


def _steps(length_s: float, rng: random.Random) -> Callable[[float], float]:
    """The load jumps to another level every 12 minutes."""
    levels = [0.4, 1.6, 0.8, 1.8, 0.3]
    return lambda at_s: levels[min(int(at_s / length_s * len(levels)), len(levels) - 1)]


def _bursts(length_s: float, rng: random.Random) -> Callable[[float], float]:
    """Four bursts of three minutes at random instants, of three times the load between them."""
    starts = [(index + 0.1 + 0.6 * rng.random()) * length_s / 4 for index in range(4)]
    return lambda at_s: 2.1 if any(0 <= at_s - start < 180 for start in starts) else 0.7


def _gaps(length_s: float, rng: random.Random) -> Callable[[float], float]:
    """Ten minutes with calls, then twenty without any."""
    return lambda at_s: 0.5 if at_s % 1800 < 600 else 0.0


SHAPES: Mapping[str, Shape] = {
    "day": Shape(length_s=2 * HOUR_S, load=_day),
    "steps": Shape(length_s=HOUR_S, load=_steps),
    "bursts": Shape(length_s=HOUR_S, load=_bursts),
    "gaps": Shape(length_s=2 * HOUR_S, load=_gaps),
}
NAMES = (*FROM_AZURE, *SHAPES)


def length_s(name: str) -> float:
    """The length of a trace in seconds."""
    return SHAPES[name].length_s if name in SHAPES else HOUR_S


def trace(name: str, seed: int, rate: float, published: Sequence[TraceCall] = ()) -> list[TraceCall]:
    """The calls of a trace; `rate` is the base load in calls a second. `published` is the Azure trace, for the traces that
    replay it."""
    rng = random.Random(f"autoscaling {name} {seed}")
    if name in SHAPES:
        return _shaped(rng, SHAPES[name], rate)
    taken = _thinned(published, rng, rate)
    if name == "azure":
        return taken
    return [replace(call, arrival_s=_on_wave(call.arrival_s / HOUR_S) * HOUR_S) for call in taken]


def learned(calls: int) -> list[TraceCall]:
    """Calls from which a gateway has learned the lengths; no trace has them."""
    rng = random.Random("autoscaling learned")
    return [_drawn(rng, index, float(index)) for index in range(calls)]


def _shaped(rng: random.Random, shape: Shape, rate: float) -> list[TraceCall]:
    """Calls of a load that changes."""
    load = shape.load(shape.length_s, rng)
    most = max(load(at_s) for at_s in range(int(shape.length_s)))
    instants = azure_suite.arrivals(rng, rate, load, most=most, length_s=shape.length_s)
    return [_drawn(rng, index, at_s) for index, at_s in enumerate(instants)]


def _drawn(rng: random.Random, index: int, at_s: float) -> TraceCall:
    return _with_targets(
        TraceCall(
            id=f"c{index}",
            arrival_s=at_s,
            prompt_tokens=min(max(round(rng.lognormvariate(*PROMPT)), 1), LONGEST_PROMPT),
            output_tokens=min(max(round(rng.lognormvariate(*OUTPUT)), 1), LONGEST_OUTPUT),
        )
    )


def _with_targets(call: TraceCall) -> TraceCall:
    return replace(call, slo_class="chat", ttft_slo_ms=TTFT_S * 1000, tpot_slo_ms=TPOT_S * 1000)


def _thinned(calls: Sequence[TraceCall], rng: random.Random, rate: float) -> list[TraceCall]:
    """The hour of the published trace, of which a random part is kept so that the mean is `rate` calls a second."""
    within = [call for call in calls if call.arrival_s < HOUR_S]
    share = rate * HOUR_S / len(within) if within else math.inf
    if share > 1:
        raise BadTrace(f"the trace has {len(within) / HOUR_S:.2f} calls a second, and {rate:g} are asked for")
    kept = [call for call in within if rng.random() < share]
    return [_with_targets(replace(call, prompt_tokens=min(call.prompt_tokens, LONGEST_PROMPT))) for call in kept]


def _on_wave(share: float) -> float:
    """Moves an instant (both as shares of the hour) so that the load has a wave from 0.3 to 1.7 times its mean: the inverse
    of the integral of `1 - 0.7 * cos(2 * pi * t)`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if middle - 0.7 * math.sin(2 * math.pi * middle) / (2 * math.pi) < share:
            low = middle
        else:
            high = middle
    return low
