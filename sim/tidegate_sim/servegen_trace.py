"""Imports ServeGen's production statistics (Apache-2.0): a folder with two files for each client.

`chunk-N-trace.csv` has a line for each window of 600 s: its start, calls a second, coefficient of variation, and the family
(Gamma or Weibull), shape and scale of the gaps. `chunk-N-dataset.json` has, for longer periods, histograms of prompt and
output tokens, each as the text of a mapping from a length to its probability. These are statistics and not a log: gaps
and lengths are drawn here, and the gaps of a window are stretched so that the window has its number of calls.
"""

import ast
import bisect
import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_sim.trace_format import BadTrace, TraceCall

WINDOW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The histograms of a client, by the start of their periods."""

    starts_s: Sequence[float]
    prompts: Sequence[Mapping[int, float]]
    outputs: Sequence[Mapping[int, float]]

    def draw(self, rng: random.Random, at_s: float) -> tuple[int, int]:
        """Prompt and output tokens of a call."""
        period = max(bisect.bisect_right(self.starts_s, at_s) - 1, 0)
        return _drawn(rng, self.prompts[period]), _drawn(rng, self.outputs[period])


def read(folder: Path, rng: random.Random, *, start_s: float, span_s: float, scale: float) -> list[TraceCall]:
    """The calls of all clients from `start_s` on, in order of arrival; `scale` multiplies their rates.

    A client is a tenant. Clients without histograms are left out. Raises `BadTrace`, `OSError`.
    """
    calls: list[TraceCall] = []
    for path in sorted(folder.glob("chunk-*-trace.csv")):
        client = path.name.removesuffix("-trace.csv")
        dataset = folder / f"{client}-dataset.json"
        try:
            lengths = _lengths(json.loads(dataset.read_text())) if dataset.exists() else None
            if lengths is None:
                continue
            instants = sorted(_instants(path, rng, start_s, span_s, scale))
        except (ValueError, KeyError, IndexError, TypeError, SyntaxError) as error:
            raise BadTrace(f"{path}: not the statistics of a ServeGen client: {error!r}") from error
        for number, at_s in enumerate(instants):
            prompt, output = lengths.draw(rng, at_s)
            calls.append(
                TraceCall(
                    id=f"{client}-{number}",
                    arrival_s=round(at_s - start_s, 6),
                    prompt_tokens=max(prompt, 1),
                    output_tokens=max(output, 1),
                    tenant=client,
                )
            )
    if not calls:
        raise BadTrace(f"{folder} has no chunk-N-trace.csv with calls in this time and a chunk-N-dataset.json")
    return sorted(calls, key=lambda call: call.arrival_s)


def _instants(path: Path, rng: random.Random, start_s: float, span_s: float, scale: float) -> Iterator[float]:
    """The instants of arrival in the windows that overlap the span."""
    with path.open() as lines:
        for row in csv.reader(lines):
            begins_s, rate = float(row[0]), float(row[1]) * scale
            if not start_s - WINDOW_S < begins_s < start_s + span_s or not rate:
                continue
            count = _rounded(rng, rate * WINDOW_S)
            gaps = [_gap(rng, row[3], float(row[4]), float(row[5])) for _ in range(count + 1)]
            stretch, at_s = WINDOW_S / (sum(gaps) or 1.0), begins_s
            for gap in gaps[:-1]:
                at_s += gap * stretch
                if start_s <= at_s < start_s + span_s:
                    yield at_s


def _gap(rng: random.Random, family: str, shape: float, scale: float) -> float:
    if family == "Weibull":
        return rng.weibullvariate(scale, shape)
    if family == "Gamma":
        return rng.gammavariate(shape, scale)
    raise ValueError(f"gaps of the family {family!r}")


def _rounded(rng: random.Random, number: float) -> int:
    """A whole number whose mean is `number`."""
    return int(number) + (rng.random() < number % 1)


def _lengths(document: Any) -> Lengths | None:
    """The periods with calls; None if there are none."""
    periods = [
        (float(start), ast.literal_eval(item["input_tokens"]), ast.literal_eval(item["output_tokens"]))
        for start, item in document.items()
    ]
    known = sorted((start, prompts, outputs) for start, prompts, outputs in periods if prompts and outputs)
    if not known:
        return None
    starts_s, prompts, outputs = zip(*known, strict=True)
    return Lengths(starts_s=starts_s, prompts=prompts, outputs=outputs)


def _drawn(rng: random.Random, histogram: Mapping[int, float]) -> int:
    return int(rng.choices(list(histogram), list(histogram.values()))[0])
