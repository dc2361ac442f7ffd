"""How much more than the predicted work must the engines carry, so that calls meet their targets?

The prediction says how much work there is, and not how much room bursts and long calls need. This factor learns it from the
targets that calls met: a class that misses more than its objective allows raises it at once, and a long time with few
misses lowers it slowly. Misses while engines are starting say nothing about it and do not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LEAST, MOST = 1.0, 2.0
"""The bounds of the factor."""
FIRST = 1.1
RAISE, LOWER = 1.15, 0.97
ENOUGH = 200
"""Calls with a target before a class is judged."""
PLENTY = 400
"""Calls with a target before few misses lower the factor."""
FEW = 0.3
"""Misses are few below this share of what the objective allows."""
BUSY = 0.5
"""More engines mend no misses while the load is below this share of what the engines carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The calls of a class that ended and had a target."""

    objective: float
    """The share that should meet the target, from 0 to 1."""
    with_target: int = 0
    missed: int = 0

    def __add__(self, other: "Targets") -> "Targets":
        return replace(other, with_target=self.with_target + other.with_target, missed=self.missed + other.missed)

    @property
    def allowed(self) -> float:
        """Misses that the objective allows."""
        return (1 - self.objective) * self.with_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The factor, and what was seen since it changed last."""

    factor: float = FIRST
    seen: Mapping[str, Targets] = field(default_factory=dict)
    """By class."""

    @property
    def worst(self) -> str | None:
        """The class that misses most of what its objective allows, among those that miss more than that."""
        over = {
            name: each.missed / max(each.allowed, 0.5)
            for name, each in self.seen.items()
            if each.with_target >= ENOUGH and each.missed > max(each.allowed, 0.5)
        }
        return max(over, key=lambda name: (over[name], name)) if over else None


def observed(before: Headroom, targets: Mapping[str, Targets], *, settled: bool, load: float) -> Headroom:
    """The factor after further calls. `settled`: all engines that are wanted are ready. `load`: the work over what the
    engines carry."""
    if not settled:
        return replace(before, seen={})
    seen = dict(before.seen)
    for name, each in targets.items():
        seen[name] = seen[name] + each if name in seen else each
    after = replace(before, seen=seen)
    if after.worst is not None:
        raised = min(before.factor * RAISE, MOST) if load >= BUSY else before.factor
        return Headroom(factor=raised)
    if sum(each.with_target for each in seen.values()) < PLENTY:
        return after
    calm = all(each.missed <= FEW * each.allowed for each in seen.values())
    return Headroom(factor=max(before.factor * LOWER, LEAST) if calm else before.factor)
