"""The cost model of an engine, refined by the step times that the engine itself measures.

Recursive least squares with forgetting over the five terms of a step (`cost.CostModel`). A step time far outside the
present error is an outlier and is not learned, unless so many follow each other that the engine itself must have changed.
No coefficient becomes negative. The error is measured on each step before the step is learned.
"""

import bisect
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean

from tidegate_policy.cost import CostModel

FORGETTING = 0.998
"""Weight of the past at each step: the last 500 steps count."""
FIRST_STEPS = 64
"""Steps before the refined coefficients are used."""
KEPT_ERRORS = 256
OUTLIER = 8.0
"""A step whose error, relative to the smaller of prediction and measurement, exceeds the 95th percentile of the latest
errors this many times is an outlier."""
NEW_REGIME = 24
"""Outliers in a row that are learned after all."""
DOUBT = 0.3
"""Relative uncertainty of the first coefficients."""
TYPICAL = (1.0, 512.0, 65536.0, 16.0, 8192.0)
"""Typical size of each term's quantity. It scales the terms, so that one uncertainty fits them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step computed, in the terms of `CostModel.step_seconds`."""

    uncached: int = 0
    attended: int = 0
    decodes: int = 0
    context: int = 0


class StepCost:
    """The estimate. `model` is the present cost model."""

    def __init__(self, first: CostModel) -> None:
        self.model = first
        self.steps = 0
        """Steps that were learned."""
        self._first = first
        coefficients = (first.step_s, first.prefill_s, first.attention_s, first.decode_s, first.context_s)
        self._weights = [value * size for value, size in zip(coefficients, TYPICAL, strict=True)]
        largest = max(self._weights)
        self._covariance = [[0.0] * 5 for _ in range(5)]
        for index, weight in enumerate(self._weights):
            # A term that the first profile leaves out may still exist.
            self._covariance[index][index] = (DOUBT * max(weight, 0.05 * largest)) ** 2
        self._noise = (0.05 * largest) ** 2
        self._errors = _Errors()
        self._outliers = 0

    @property
    def mean_error(self) -> float:
        """Mean relative error of the latest predictions of step times."""
        return self._errors.mean

    @property
    def p95_error(self) -> float:
        """95th percentile of the relative errors of the latest predictions of step times."""
        return self._errors.p95

    def observe(self, work: StepWork, step_s: float) -> None:
        """A step with this work took `step_s` seconds."""
        if step_s <= 0.0:
            return
        terms = (1.0, work.uncached, work.attended, work.decodes, work.context)
        x = [value / size for value, size in zip(terms, TYPICAL, strict=True)]
        predicted_s = sum(weight * value for weight, value in zip(self._weights, x, strict=True))
        error = abs(predicted_s - step_s) / step_s
        surprise = abs(predicted_s - step_s) / max(min(predicted_s, step_s), 1e-9)
        if self.steps >= FIRST_STEPS and surprise > OUTLIER * max(self._errors.p95, 0.01):
            self._outliers += 1
            if self._outliers < NEW_REGIME:
                return
        self._outliers = 0
        self._errors.add(error)
        self._learn(x, step_s - predicted_s)
        self.steps += 1
        if self.steps >= FIRST_STEPS and self.steps % 16 == 0:
            self.model = self._refined()

    def _learn(self, x: list[float], residual_s: float) -> None:
        rows = self._covariance
        gains = [sum(row[j] * x[j] for j in range(5)) for row in rows]
        scale = FORGETTING * self._noise + sum(x[i] * gains[i] for i in range(5))
        for i in range(5):
            gain = gains[i] / scale
            self._weights[i] = max(self._weights[i] + gain * residual_s, 0.0)
            row = rows[i]
            for j in range(5):
                row[j] = (row[j] - gain * gains[j]) / FORGETTING
        # Without this bound, forgetting would inflate the terms that present steps do not exercise.
        for i in range(5):
            ceiling = (10.0 * DOUBT * max(self._weights)) ** 2
            if rows[i][i] > ceiling:
                shrink = (ceiling / rows[i][i]) ** 0.5
                for j in range(5):
                    rows[i][j] *= shrink
                    rows[j][i] *= shrink

    def _refined(self) -> CostModel:
        step, prefill, attention, decode, context = (
            weight / size for weight, size in zip(self._weights, TYPICAL, strict=True)
        )
        return replace(
            self._first,
            step_s=max(step, 1e-9),
            prefill_s=max(prefill, 1e-12),
            attention_s=attention,
            decode_s=decode,
            context_s=context,
        )


@dataclass(slots=True)
class _Errors:
    """The latest relative errors."""

    _latest: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def add(self, error: float) -> None:
        self._latest.append(error)
        bisect.insort(self._ordered, error)
        if len(self._latest) > KEPT_ERRORS:
            del self._ordered[bisect.bisect_left(self._ordered, self._latest.popleft())]

    @property
    def mean(self) -> float:
        return fmean(self._latest) if self._latest else 0.0

    @property
    def p95(self) -> float:
        return self._ordered[int(0.95 * (len(self._ordered) - 1))] if self._ordered else 0.0
