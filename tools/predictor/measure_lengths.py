"""How well is the length of an answer predicted, and how often is it below its upper bound? Prints two tables.

    .venv/bin/python tools/predictor/measure_lengths.py DATA

DATA is a folder with the public files that `prompt_data` reads. Each source is replayed call by call, so that a predictor
sees a call only after it has predicted it. The first half of each source is not counted; the text model is trained
on it. Errors are mean absolute errors in tokens.
"""

import collections
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import linear_model
import numpy as np
import prompt_data
from prompt_data import Length

from tidegate_policy.predict import output_length

MOST = 6000
"""Calls of a source that are replayed."""
MODEL = "m"


class Shipped:
    """The predictor that the gateway runs."""

    def __init__(self) -> None:
        self._lengths = output_length.OutputLengths()

    def predict(self, call: Length) -> tuple[int, int]:
        found = self._lengths.predict(("", "", call.kind, MODEL), None, call.prompt_tokens)
        return found.expected, found.upper

    def observe(self, call: Length) -> None:
        seen = output_length.LengthObservation(
            tenant="",
            characters=0,
            messages=0,
            sequences=1,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
        )
        self._lengths.observe(("", "", call.kind, MODEL), seen)


class RunningMean:
    """The mean of all calls with the same key, and two standard deviations above it."""

    def __init__(self, key: Callable[[Length], object], *, middle: Callable[[Sequence[int]], float]) -> None:
        self._key, self._middle = key, middle
        self._seen: dict[object, collections.deque[int]] = collections.defaultdict(
            lambda: collections.deque(maxlen=200)
        )

    def predict(self, call: Length) -> tuple[int, int]:
        seen = self._seen[self._key(call)]
        if len(seen) < 2:
            return 128, 0
        expected = max(round(self._middle(seen)), 1)
        return expected, round(statistics.fmean(seen) + 2 * statistics.pstdev(seen))

    def observe(self, call: Length) -> None:
        self._seen[self._key(call)].append(call.output_tokens)


class TextModel:
    """Regression of the logarithm of the length on hashed words, trained on the first half of the source."""

    def __init__(self, calls: Sequence[Length]) -> None:
        half = calls[: len(calls) // 2]
        x = linear_model.matrix([call.text for call in half])
        self._mean = float(np.mean([np.log(call.output_tokens) for call in half]))
        target = np.array([np.log(call.output_tokens) - self._mean for call in half], dtype=np.float32)
        self._weights = np.linalg.solve(x.T @ x + 0.3 * np.eye(linear_model.BUCKETS, dtype=np.float32), x.T @ target)

    def error(self, call: Length) -> float:
        found = linear_model.features(call.text)
        size = 1 / np.sqrt(len(found) or 1)
        predicted = np.exp(self._mean + size * self._weights[found].sum())
        return abs(max(round(float(predicted)), 1) - call.output_tokens)


def majority(seen: Sequence[int]) -> float:
    """The middle of the most frequent bucket of lengths (powers of two): the majority class of a bucket classifier."""
    bucket = collections.Counter(tokens.bit_length() for tokens in seen).most_common(1)[0][0]
    return statistics.median(tokens for tokens in seen if tokens.bit_length() == bucket)


def main(data: Path) -> None:
    rng = random.Random(1)
    header = ("majority bucket", "prompt length (rule)", "text model", "mean of the kind", "shipped")
    print(f"| source | calls | {' | '.join(header)} |\n|---|---|{'---|' * len(header)}")
    for source, calls in prompt_data.lengths(data).items():
        if "gold" in source:
            calls = rng.sample(list(calls), min(len(calls), MOST))
        calls = calls[:MOST]
        rivals = {
            "majority bucket": RunningMean(lambda _: 0, middle=majority),
            "prompt length (rule)": RunningMean(lambda call: call.prompt_tokens.bit_length(), middle=statistics.fmean),
            "mean of the kind": RunningMean(lambda call: call.kind, middle=statistics.fmean),
            "shipped": Shipped(),
        }
        errors: dict[str, list[int]] = collections.defaultdict(list)
        bounds: collections.Counter[str] = collections.Counter()
        by_bucket: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
        for index, call in enumerate(calls):
            for name, rival in rivals.items():
                expected, upper = rival.predict(call)
                if index >= len(calls) // 2:
                    errors[name].append(abs(expected - call.output_tokens))
                    if name == "mean of the kind":
                        bounds["two deviations"] += call.output_tokens <= upper
                    if name == "shipped" and upper:
                        found = by_bucket[expected.bit_length()]
                        found[0] += 1
                        found[1] += call.output_tokens <= upper
                        found[2] += upper
                rival.observe(call)
        if calls[0].text:
            model = TextModel(calls)
            errors["text model"] = [round(model.error(call)) for call in calls[len(calls) // 2 :]]
        cells = [f"{statistics.fmean(errors[name]):.1f}" if errors[name] else "-" for name in header]
        print(f"| {source} | {len(calls)} | {' | '.join(cells)} |", flush=True)
        counted = len(errors["shipped"])
        told = [
            f"{2 ** (bucket - 1)}-{2**bucket - 1}: {below / count:.1%} of {count} (mean bound {bound / count:.0f})"
            for bucket, (count, below, bound) in sorted(by_bucket.items())
            if count >= 50
        ]
        whole = sum(below for _, below, _ in by_bucket.values()) / max(
            sum(count for count, _, _ in by_bucket.values()), 1
        )
        LINES.append(f"| {source} | {bounds['two deviations'] / counted:.1%} | {whole:.1%} | {'; '.join(told)} |")
    print(
        "\n| source | below mean + 2 deviations | below the shipped bound | shipped bound by bucket of the prediction |"
    )
    print("|---|---|---|---|")
    print("\n".join(LINES))


LINES: list[str] = []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
