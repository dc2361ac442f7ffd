"""The highest rate that meets a condition, by bisection, for many rows at once so that their cells run side by side."""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def search(
    bounds: Mapping[Name, tuple[float, float]],
    halvings: int,
    met: Callable[[Mapping[Name, float]], Mapping[Name, bool]],
) -> dict[Name, float]:
    """The highest rate of each name for which `met` said yes; the lower bound if it never did.

    `met` gets one rate for each name. The result is below the true rate by at most the width of the bounds, halved
    `halvings` times."""
    between = dict(bounds)
    for _ in range(halvings):
        middle = {name: (low + high) / 2 for name, (low, high) in between.items()}
        answers = met(middle)
        for name, (low, high) in between.items():
            between[name] = (middle[name], high) if answers[name] else (low, middle[name])
    return {name: low for name, (low, _) in between.items()}
