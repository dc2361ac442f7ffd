"""The five coefficients of a cost model, refined by measured times.

Recursive least squares with forgetting over the terms of `cost.CostModel`. A time far outside the present error is an
outlier and is not learned, unless many follow each other. When the errors lean to one side for long, the engine itself
has changed: then all coefficients are as uncertain as at first, so that the change is shared by all of them. No
coefficient becomes negative, or larger than any engine's. Where times that fit no engine have spoilt the arithmetic, the
estimate begins anew. The error is measured on each time before the time is learned.

Two estimates use it. In an engine each time is one step (`step_cost`). In a gateway each time is a part of a stream
(`engine_cost`).
"""

import math
from dataclasses import replace

from tidegate_policy.cost import CostModel
from tidegate_policy.predict import latest_errors

KEPT_ERRORS = 256
OUTLIER = 8.0
"""A time whose error, relative to the smaller of prediction and measurement, exceeds the 95th percentile of the latest
errors this many times is an outlier."""
NEW_REGIME = 24
"""Outliers in a row that are learned after all."""
TYPICAL = (1.0, 512.0, 65536.0, 16.0, 8192.0)
"""Typical size of each term's quantity in one step. It scales the terms, so that one uncertainty fits them all."""

MOST_S = 100.0
"""No term of a typical step takes longer."""
MOST_QUANTITY = 2e7
"""Times in which an engine did more than so many typical steps' worth of a term are not learned: two prompts of a million
tokens attend to less, and the squares of larger numbers leave no digits for the others."""
ABSURD, MOST_ABSURD = 100.0, 8
"""After so many times in a row whose prediction is wrong by this factor the estimate begins anew."""
LEANING, NEWEST = 0.2, 0.1
"""The mean relative error, with its sign, beyond which the engine has changed; and the weight of the newest error in it."""

Terms = tuple[float, float, float, float, float]
"""(steps, uncached tokens, attended pairs, decodes, context tokens) of a measured time."""


class Coefficients:
    """The estimate of one engine."""

    __slots__ = (
        "_absurd",
        "_ceilings",
        "_covariance",
        "_doubt",
        "_errors",
        "_first",
        "_first_weights",
        "_forgetting",
        "_lean",
        "_outliers",
        "_trusting",
        "_weights",
        "learned",
    )

    def __init__(self, first: CostModel, *, doubt: float, forgetting: float, trusting: int) -> None:
        """`doubt` is the relative uncertainty of `first`, `forgetting` the weight of the past at each time, and
        `trusting` the number of times that are learned before the first time can be an outlier."""
        self.learned = 0
        """Times that were learned."""
        self._first = first
        self._doubt, self._forgetting, self._trusting = doubt, forgetting, trusting
        coefficients = (first.step_s, first.prefill_s, first.attention_s, first.decode_s, first.context_s)
        self._first_weights = [value * size for value, size in zip(coefficients, TYPICAL, strict=True)]
        self._weights = list(self._first_weights)
        self._errors = latest_errors.LatestErrors(KEPT_ERRORS)
        self._outliers = self._absurd = 0
        self._lean = 0.0
        self._ceilings: list[float] = []
        self._covariance: list[list[float]] = []
        self._doubt_all()

    @property
    def largest(self) -> float:
        """Seconds of the largest term of a typical step."""
        return max(self._weights)

    @property
    def mean_error(self) -> float:
        """Mean relative error of the latest predictions."""
        return self._errors.mean

    @property
    def p95_error(self) -> float:
        """95th percentile of the relative errors of the latest predictions."""
        return self._errors.p95

    def observe(self, terms: Terms, seconds: float, noise_s: float, share: float = 0.0) -> bool:
        """The work `terms` took `seconds`, which are wrong by about `noise_s` and by `share` of the prediction. Returns
        False for an outlier."""
        x = [value / size for value, size in zip(terms, TYPICAL, strict=True)]
        if max(x) > MOST_QUANTITY:
            return False
        predicted_s = sum(weight * value for weight, value in zip(self._weights, x, strict=True))
        miss_s = abs(predicted_s - seconds)
        surprise = miss_s / max(min(predicted_s, seconds), 1e-9)
        if self.learned >= self._trusting and surprise > OUTLIER * max(self._errors.p95, 0.01):
            self._outliers += 1
            if self._outliers < NEW_REGIME:
                return False
        self._outliers = 0
        self._errors.add(miss_s / seconds)
        self._lean += NEWEST * (min(max(seconds / max(predicted_s, 1e-9) - 1.0, -1.0), 1.0) - self._lean)
        if self.learned >= self._trusting and abs(self._lean) > LEANING:
            self._doubt_all()
        self._absurd = self._absurd + 1 if surprise > ABSURD and self.learned >= self._trusting else 0
        if self._absurd > MOST_ABSURD:
            self._begin_anew()
        else:
            self._learn(x, seconds - predicted_s, (noise_s + share * predicted_s) ** 2)
        self.learned += 1
        return True

    def model(self) -> CostModel:
        """The cost model with the present coefficients."""
        step, prefill, attention, decode, context = [
            weight / size for weight, size in zip(self._weights, TYPICAL, strict=True)
        ]
        return replace(
            self._first,
            step_s=max(step, 1e-9),
            prefill_s=max(prefill, 1e-12),
            attention_s=attention,
            decode_s=decode,
            context_s=context,
        )

    def _doubt_all(self) -> None:
        """Makes every coefficient as uncertain as a first one. A term that is absent may still exist."""
        largest = max(self._weights)
        self._ceilings = [(self._doubt * max(weight, 0.05 * largest)) ** 2 for weight in self._weights]
        self._covariance = [[self._ceilings[i] if i == j else 0.0 for j in range(5)] for i in range(5)]
        self._lean = 0.0

    def _begin_anew(self) -> None:
        self._weights = list(self._first_weights)
        self._absurd = 0
        self._doubt_all()

    def _learn(self, x: list[float], residual_s: float, noise: float) -> None:
        rows, forgetting = self._covariance, self._forgetting
        gains = [sum(row[j] * x[j] for j in range(5)) for row in rows]
        spread = sum(x[i] * gains[i] for i in range(5))
        scale = forgetting * noise + spread
        if not (spread >= 0.0 and 0.0 < scale < math.inf):
            self._begin_anew()
            return
        weights = [min(max(self._weights[i] + gains[i] / scale * residual_s, 0.0), MOST_S) for i in range(5)]
        if abs(sum((weights[i] - self._weights[i]) * x[i] for i in range(5)) - residual_s) > abs(residual_s):
            # A term that would be negative is none, and what the others then say is farther off than before. So all terms
            # take their parts of the correction.
            predicted_s = sum(self._weights[i] * x[i] for i in range(5))
            ratio = min(max((predicted_s + residual_s) / max(predicted_s, 1e-9), 0.5), 2.0)
            part = spread / scale
            weights = [min(weight * (1.0 + part * (ratio - 1.0)), MOST_S) for weight in self._weights]
        self._weights = weights
        for i in range(5):
            gain = gains[i] / scale
            row = rows[i]
            for j in range(5):
                row[j] = (row[j] - gain * gains[j]) / forgetting
        # Rounding may leave a variance that is none, from which errors would grow without end.
        if not all(0.0 <= rows[i][i] < math.inf and self._weights[i] < math.inf for i in range(5)):
            self._begin_anew()
            return
        # Without this bound, forgetting would inflate the terms that present work does not exercise.
        for i in range(5):
            if rows[i][i] > self._ceilings[i]:
                shrink = (self._ceilings[i] / rows[i][i]) ** 0.5
                for j in range(5):
                    rows[i][j] *= shrink
                    rows[j][i] *= shrink
