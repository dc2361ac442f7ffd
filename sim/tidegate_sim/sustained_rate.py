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
        middle = {
            name: math.sqrt(low * high) if bounds[name][0] else (low + high) / 2
            for name, (low, high) in between.items()
        }
        answers = met(middle)
        for name, (low, high) in between.items():
            between[name] = (middle[name], high) if answers[name] else (low, middle[name])
    return {name: low for name, (low, _) in between.items()}
