"""What arrived lately, how much of it is noise, and what will arrive when an engine that starts now is ready?

The history is a tuple of slices of time. It follows from the arrivals alone, so a driver may lose it: the autoscaler then
lowers nothing until it has seen enough again.
"""

import itertools
import math
import statistics
from dataclasses import dataclass

from tidegate_policy.scale import call_load
from tidegate_policy.scale.call_load import CallLoad

LEAST_SLICE_S = 5.0
"""Observations that follow each other faster are joined."""
RECENT_S = 60.0
"""The time over which the present rate is the mean."""
JUMP_S, JUMP_CERTAIN = 20.0, 3.0
"""A jump is seen in the newest `JUMP_S` seconds, if it is above so many standard errors."""
TREND_S = 600.0
"""The time over which growth is measured."""
CERTAIN = 2.0
"""Growth counts if it is above so many standard errors."""
MOST_GROWTH = 1.0
"""The prediction adds at most so many times the present rate."""
MOST_DISPERSION = 16.0
LEAST_SLICES = 8
"""Slices before the dispersion is measured."""
MEDIAN_DIFFERENCE = 0.954
"""The median difference of two values of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The calls that arrived in the `seconds` before `at_s`."""

    at_s: float
    seconds: float
    load: CallLoad


History = tuple[Slice, ...]


def extended(history: History, slice: Slice, *, keep_s: float) -> History:
    """The history with one more slice, without the slices that are older than `keep_s`."""
    last = history[-1] if history else None
    if last is not None and last.seconds + slice.seconds <= LEAST_SLICE_S:
        joined = Slice(at_s=slice.at_s, seconds=last.seconds + slice.seconds, load=last.load + slice.load)
        history, slice = history[:-1], joined
    return (*(each for each in history if each.at_s > slice.at_s - keep_s), slice)


def seen_s(history: History) -> float:
    """Seconds that the history covers."""
    return sum(each.seconds for each in history)


def rate(history: History, *, newest_s: float, skip_s: float = 0.0) -> CallLoad:
    """The mean load of a second over the newest `newest_s` seconds, after `skip_s` seconds are left out."""
    if not history:
        return call_load.NOTHING
    until_s = history[-1].at_s - skip_s
    chosen = [each for each in history if until_s - newest_s < each.at_s <= until_s]
    seconds = sum(each.seconds for each in chosen)
    if seconds <= 0.0:
        return call_load.NOTHING
    total = call_load.NOTHING
    for each in chosen:
        total += each.load
    return total.times(1 / seconds)


def recent(history: History) -> CallLoad:
    """The present rate: the mean of `RECENT_S` seconds, or of `JUMP_S` seconds if that is greater by more than noise."""
    slow, quick = rate(history, newest_s=RECENT_S), rate(history, newest_s=JUMP_S)
    noise = math.sqrt(dispersion(history) * max(slow.calls, 1 / JUMP_S) / JUMP_S)
    return quick if quick.calls > slow.calls + JUMP_CERTAIN * noise else slow


def dispersion(history: History) -> float:
    """The variance of the number of calls in a slice over its mean: 1 for a Poisson process, more for bursts.

    The median difference of neighbours measures it, so that neither growth nor a jump to another level counts."""
    counts = [each.load.calls for each in history]
    mean = sum(counts) / len(counts) if counts else 0.0
    if len(counts) < LEAST_SLICES or mean < 1.0:
        return 1.0
    deviation = (
        statistics.median(abs(after - before) for before, after in itertools.pairwise(counts)) / MEDIAN_DIFFERENCE
    )
    return min(max(deviation**2 / mean, 1.0), MOST_DISPERSION)


def growth(history: History, *, ahead_s: float) -> float:
    """By which factor the rate will be greater in `ahead_s` seconds, from 1 to 1 + `MOST_GROWTH`.

    The rate must have grown from each quarter of `TREND_S` to the next one, and altogether beyond the noise. The smallest
    of the three steps counts. So a jump to another level is no growth, and a falling rate counts as a steady one."""
    quarter_s = TREND_S / 4
    if seen_s(history) < TREND_S:
        return 1.0
    rates = [rate(history, newest_s=quarter_s, skip_s=skip * quarter_s).calls for skip in (3, 2, 1, 0)]
    error = math.sqrt(dispersion(history) * (rates[0] + rates[-1]) / quarter_s)
    step = min(after - before for before, after in itertools.pairwise(rates))
    if step <= 0.0 or rates[-1] - rates[0] <= CERTAIN * error:
        return 1.0
    return 1.0 + min(step / quarter_s * ahead_s / rates[-1], MOST_GROWTH)
