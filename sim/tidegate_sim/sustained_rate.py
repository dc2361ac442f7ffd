"""The highest rate that meets a condition, by bisection, for many rows at once so that their cells run side by side."""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def search(
    bounds: Mapping[Name, tuple[float, float]],
    halvings: int,
    met: Callable[[Mapping[Name, float]], Mapping[Name, bool]],
) -> dict[Name, float]:
    """The highest rate of each name for which `met` said yes; the lower bound if it never did.

    `met` gets one rate for each name: the middle of its bounds, or their geometric mean if the lower bound is not zero."""
    between = dict(bounds)
    for _ in range(halvings):
        middle = {name: _middle(low, high, geometric=bool(bounds[name][0])) for name, (low, high) in between.items()}
        answers = met(middle)
        for name, (low, high) in between.items():
            between[name] = (middle[name], high) if answers[name] else (low, middle[name])
    return {name: low for name, (low, _) in between.items()}


def extremes(bounds: tuple[float, float], halvings: int) -> tuple[float, float]:
    """The rates that `search` gives where its condition never held, and where it always did."""
    low, high = bounds
    for _ in range(halvings):
        low = _middle(low, high, geometric=bool(bounds[0]))
    return bounds[0], low


def _middle(low: float, high: float, *, geometric: bool) -> float:
    return math.sqrt(low * high) if geometric else (low + high) / 2
