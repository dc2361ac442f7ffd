"""Sessions of calls with tools between them: six kinds of tools in one mix (AugServe, section 5.1, the workload Merge).

The parameters are fitted to 238 published sessions with 1,204 calls (InferCept's mix, Apache-2.0). Counts of calls are
shares of the sessions. Log-normal parameters are means and deviations of logarithms. Tool times above 60 s are cut in the
data. A call's prompt is the prompt and the output of the call before it, and the tokens that the tool returned. A session
ends early before its context exceeds `MAX_CONTEXT`.
"""

import csv
import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_sim.trace_format import BadTrace, Tool, TraceCall, opened

MAX_CONTEXT = 4096
"""Tokens of a session's longest prompt and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The sessions of one tool."""

    share: int
    """Published sessions of this kind."""
    calls: Mapping[int, int]
    """Number of calls: sessions that had it."""
    prompt: tuple[float, float, int, int]
    """Of the first prompt's tokens: mean and deviation of the logarithm, least, most."""
    output: tuple[float, float, int, int]
    last_output: tuple[float, float, int, int]
    """Of the session's last answer."""
    returned: tuple[float, float, int, int]
    """Of the tokens that the tool adds to the next prompt."""
    tool_s: tuple[float, float, float, float]
    """Of the tool's seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of a session, and the tool after it."""

    prompt_tokens: int
    """With the whole context before it."""
    output_tokens: int
    tool_s: float
    returned: int
    """Tokens that the tool adds to the next prompt."""


KINDS: Mapping[str, Kind] = {
    "math": Kind(
        share=62,
        calls={2: 13, 3: 8, 4: 6, 5: 35},
        prompt=(6.017, 0.05, 370, 931),
        output=(4.5, 0.81, 15, 1353),
        last_output=(4.04, 1.12, 15, 1353),
        returned=(3.03, 0.19, 17, 51),
        tool_s=(-9.4, 0.3, 5e-5, 6e-4),
    ),
    "qa": Kind(
        share=31,
        calls={2: 6, 3: 5, 4: 4, 5: 16},
        prompt=(6.839, 0.007, 923, 955),
        output=(5.02, 0.69, 18, 910),
        last_output=(4.87, 0.79, 38, 910),
        returned=(4.05, 0.16, 34, 81),
        tool_s=(-0.27, 0.12, 0.5, 1.03),
    ),
    "ve": Kind(
        share=31,
        calls={4: 7, 5: 13, 6: 6, 7: 4, 8: 1},
        prompt=(7.587, 0.0, 1973, 1973),
        output=(1.386, 0.0, 4, 4),
        last_output=(1.386, 0.0, 4, 4),
        returned=(1.2, 1.0, 1, 43),
        tool_s=(-2.449, 0.143, 0.06, 0.11),
    ),
    "chatbot": Kind(
        share=46,
        calls={2: 12, 3: 4, 4: 6, 5: 7, 6: 10, 7: 2, 8: 3, 9: 2},
        prompt=(3.404, 1.552, 1, 1680),
        output=(4.32, 0.77, 10, 848),
        last_output=(5.28, 1.07, 10, 848),
        returned=(2.67, 1.3, 1, 1590),
        tool_s=(3.129, 0.717, 3.0, 60.0),
    ),
    "image": Kind(
        share=33,
        calls={2: 9, 4: 5, 6: 6, 8: 6, 10: 4, 12: 1, 14: 1, 16: 1},
        prompt=(3.297, 1.676, 1, 1166),
        output=(2.97, 1.06, 7, 98),
        last_output=(1.946, 0.0, 7, 7),
        returned=(2.25, 1.2, 1, 716),
        tool_s=(2.771, 0.609, 4.0, 60.0),
    ),
    "tts": Kind(
        share=35,
        calls={2: 9, 4: 3, 6: 6, 8: 3, 10: 7, 12: 4, 14: 2, 16: 1},
        prompt=(3.38, 1.478, 1, 1680),
        output=(2.98, 1.08, 2, 114),
        last_output=(1.946, 0.0, 7, 7),
        returned=(2.36, 1.2, 1, 1590),
        tool_s=(2.346, 1.088, 0.08, 60.0),
    ),
}


def trace(rng: random.Random, *, sessions: int, rate: float, variation: float = 1.0) -> list[TraceCall]:
    """`sessions` sessions, `rate` a second. Gaps are Gamma with this coefficient of variation; 1 is Poisson."""
    calls: list[TraceCall] = []
    arrival_s = 0.0
    shape = 1 / variation**2
    for number in range(sessions):
        arrival_s += rng.gammavariate(shape, 1 / (rate * shape))
        name = rng.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
        calls += _session(rng, KINDS[name], name, number, arrival_s)
    return calls


def imported(path: Path, rng: random.Random, *, rate: float) -> list[TraceCall]:
    """The published sessions themselves (`segments.csv.gz`), Poisson at `rate`. Raises `BadTrace`, `OSError`."""
    calls: list[TraceCall] = []
    arrival_s = 0.0
    for number, (name, turns) in enumerate(published(path)):
        arrival_s += rng.expovariate(rate)
        calls += _calls(turns, name, number, arrival_s)
    return calls


def sampled(path: Path, rng: random.Random, *, half: int, sessions: int, rate: float) -> list[TraceCall]:
    """`sessions` sessions, Poisson at `rate`, drawn with repetition from every second published session: the first, third
    and so on with half 0, the others with half 1. So a gateway can learn from one half while the other half runs. Raises
    `BadTrace`, `OSError`."""
    known = published(path)[half::2]
    if not known:
        raise BadTrace(f"{path}: fewer than two sessions with tools")
    calls: list[TraceCall] = []
    arrival_s = 0.0
    for number in range(sessions):
        arrival_s += rng.expovariate(rate)
        name, turns = rng.choice(known)
        calls += _calls(turns, name, number, arrival_s)
    return calls


@functools.lru_cache(maxsize=2)
def published(path: Path) -> Sequence[tuple[str, Sequence[Turn]]]:
    """The tool and the turns of each published session. Raises `BadTrace`, `OSError`."""
    by_session: dict[str, list[dict[str, str]]] = {}
    with opened(path) as lines:
        for row in csv.DictReader(lines):
            by_session.setdefault(row.get("request_id", ""), []).append(row)
    sessions: list[tuple[str, Sequence[Turn]]] = []
    try:
        for rows in by_session.values():
            ordered = sorted(rows, key=lambda row: int(row["segment"]))
            turns = [
                Turn(
                    prompt_tokens=max(int(row["prompt_tokens"]), 1),
                    output_tokens=max(int(row["completion_tokens"]), 1),
                    tool_s=float(row["api_time_s"] or 0.0),
                    returned=max(int(row["api_return_tokens"] or 0), 0),
                )
                for row in ordered
            ]
            sessions.append((ordered[0]["tool"], turns))
    except (KeyError, ValueError) as error:
        raise BadTrace(f"{path}: not the sessions with tools: {error!r}") from error
    return sessions


def _session(rng: random.Random, kind: Kind, name: str, number: int, arrival_s: float) -> list[TraceCall]:
    count = rng.choices(list(kind.calls), list(kind.calls.values()))[0]
    turns: list[Turn] = []
    prompt = _tokens(rng, kind.prompt)
    for index in range(count):
        last = index == count - 1
        output = _tokens(rng, kind.last_output if last else kind.output)
        returned = _tokens(rng, kind.returned)
        last = last or prompt + output + returned + kind.output[3] > MAX_CONTEXT
        tool_s = 0.0 if last else _drawn(rng, kind.tool_s)
        turns.append(Turn(prompt_tokens=prompt, output_tokens=output, tool_s=tool_s, returned=0 if last else returned))
        if last:
            break
        prompt += output + returned
    return _calls(turns, name, number, arrival_s)


def _calls(turns: Sequence[Turn], name: str, number: int, arrival_s: float) -> list[TraceCall]:
    """The calls of a session. Each prompt repeats the context before it."""
    made: list[TraceCall] = []
    first_id = 64 * number
    prefix: tuple[tuple[int, int], ...] = ()
    context = 0
    for index, turn in enumerate(turns):
        prefix = (*prefix, (first_id + 2 * index, max(turn.prompt_tokens - context, 0)))
        tool = Tool(name=name, duration_s=turn.tool_s, return_tokens=turn.returned) if index < len(turns) - 1 else None
        made.append(
            TraceCall(
                id=f"s{number}-{index}",
                arrival_s=0.0 if made else arrival_s,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                slo_class=name,
                session=f"s{number}",
                after=(made[-1].id,) if made else (),
                prefix=prefix,
                output_prefix=first_id + 2 * index + 1,
                tool=tool,
            )
        )
        prefix = (*prefix, (first_id + 2 * index + 1, turn.output_tokens))
        context = turn.prompt_tokens + turn.output_tokens
    return made


def _tokens(rng: random.Random, drawn: tuple[float, float, int, int]) -> int:
    return round(_drawn(rng, drawn))


def _drawn(rng: random.Random, parameters: tuple[float, float, float, float]) -> float:
    mean, deviation, low, high = parameters
    return min(max(math.exp(rng.gauss(mean, deviation)), low), high)
