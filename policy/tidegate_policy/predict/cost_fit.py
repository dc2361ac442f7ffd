"""Coefficients of a cost model from measured times of one engine, and the error of the fit on other measurements.

A time is a sum of the five terms of `cost.CostModel`, each with a coefficient that is not negative, plus a fixed time for
each request that does not belong to the engine's step (HTTP, tokenisation). Least squares on relative errors, by
coordinate descent: a problem of six unknowns needs no linear algebra library.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tidegate_policy.cost import CostModel

SWEEPS = 4000
"""Rounds of the coordinate descent; it stops earlier when nothing moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measured time of an engine."""

    seconds: float
    steps: int = 1
    """Steps of the engine in this time."""
    uncached: int = 0
    attended: int = 0
    decodes: int = 0
    """Decoding sequences, summed over the steps."""
    context: int = 0
    """KV tokens that they read, summed over the steps."""
    requests: int = 0
    """Requests whose fixed time is a part of this time."""

    def terms(self) -> tuple[float, ...]:
        return (self.steps, self.uncached, self.attended, self.decodes, self.context, self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted cost model."""

    cost: CostModel
    request_s: float
    """Fixed seconds of a request outside the engine's steps."""
    mean_error: float
    """Mean relative error on the timings that were not fitted."""
    p95_error: float
    fitted: int
    held_out: int


class TooFewTimings(ValueError):
    """There are fewer timings than coefficients."""


def fit(timings: Sequence[Timing], first: CostModel) -> Fit:
    """Fits two timings of three, and measures the error on the others. `first` supplies all that is not fitted.

    Raises `TooFewTimings` for fewer than nine timings."""
    if len(timings) < 9:
        raise TooFewTimings(f"a fit needs at least 9 timings, not {len(timings)}")
    held_out = [timing for index, timing in enumerate(timings) if index % 3 == 1]
    fitted = [timing for index, timing in enumerate(timings) if index % 3 != 1]
    weights = _least_squares([timing.terms() for timing in fitted], [timing.seconds for timing in fitted])
    errors = sorted(_error(weights, timing) for timing in held_out)
    step_s, prefill_s, attention_s, decode_s, context_s, request_s = weights
    return Fit(
        cost=CostModel(
            step_s=max(step_s, 1e-9),
            prefill_s=max(prefill_s, 1e-12),
            attention_s=attention_s,
            decode_s=decode_s,
            context_s=context_s,
            kv_tokens=first.kv_tokens,
            max_batch=first.max_batch,
            max_step_tokens=first.max_step_tokens,
        ),
        request_s=request_s,
        mean_error=fmean(errors),
        p95_error=errors[min(int(0.95 * len(errors)), len(errors) - 1)],
        fitted=len(fitted),
        held_out=len(held_out),
    )


def _error(weights: Sequence[float], timing: Timing) -> float:
    predicted_s = sum(weight * term for weight, term in zip(weights, timing.terms(), strict=True))
    return abs(predicted_s - timing.seconds) / timing.seconds


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The coefficients that are not negative and minimise the sum of squared relative errors."""
    columns = range(len(rows[0]))
    scales = [max((row[column] for row in rows), default=0.0) or 1.0 for column in columns]
    scaled = [
        [row[column] / scales[column] / value for column in columns] for row, value in zip(rows, seconds, strict=True)
    ]
    squares = [sum(row[column] ** 2 for row in scaled) for column in columns]
    weights = [0.0 for _ in columns]
    residuals = [1.0 for _ in rows]
    for _ in range(SWEEPS):
        moved = 0.0
        for column in columns:
            if not squares[column]:
                continue
            slope = sum(row[column] * residual for row, residual in zip(scaled, residuals, strict=True))
            change = max(slope / squares[column], -weights[column])
            if change:
                weights[column] += change
                residuals = [residual - change * row[column] for row, residual in zip(scaled, residuals, strict=True)]
                moved = max(moved, abs(change) * squares[column] ** 0.5)
        if moved < 1e-10:
            break
    return [weight / scale for weight, scale in zip(weights, scales, strict=True)]
