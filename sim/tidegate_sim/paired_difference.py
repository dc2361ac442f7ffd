"""Means with intervals over seeds, and paired comparisons of two rows on the same seeds.

Intervals are Student's t at 95%. A comparison of two rows is paired: it takes the logarithm of the ratio for each seed, so
that the spread between seeds, which both rows share, does not hide the difference between the rows.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from tidegate_sim.bench_report import Report

_T_95 = (
    (1, 12.706),
    (2, 4.303),
    (3, 3.182),
    (4, 2.776),
    (5, 2.571),
    (6, 2.447),
    (7, 2.365),
    (8, 2.306),
    (9, 2.262),
    (10, 2.228),
    (12, 2.179),
    (15, 2.131),
    (20, 2.086),
    (30, 2.042),
    (60, 2.000),
)
"""(degrees of freedom, two-sided 95% quantile). Degrees between two entries take the entry below, which is wider."""
FEWEST = 3
"""Seeds of an interval. With two of them it is six times as wide as their distance, so it would say nothing."""


def interval(values: Sequence[float]) -> Report:
    """The mean over the seeds and its 95% interval. With fewer than `FEWEST` seeds both ends are None, and `seeds` is their
    number."""
    mean = fmean(values)
    if len(values) < FEWEST:
        return {"mean": mean, "low": None, "high": None, "seeds": len(values)}
    half = _quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def times_better(ours: Sequence[float], theirs: Sequence[float]) -> Report:
    """By which factor `ours` is smaller than `theirs`: the geometric mean of the ratios seed by seed, and its interval.

    Values must be positive and in the same order of seeds."""
    found = interval([math.log(other / own) for own, other in zip(ours, theirs, strict=True)])
    return found | {key: math.exp(found[key]) for key in ("mean", "low", "high") if found[key] is not None}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Report:
    """By how much `ours` is greater than `theirs`, seed by seed, with its interval."""
    return interval([own - other for own, other in zip(ours, theirs, strict=True)])


def _quantile(degrees: int) -> float:
    return next(value for known, value in reversed(_T_95) if known <= degrees)
