"""How much of the error budget of each class is left over the last hour? From the counters of the gateways.

Pure. A gateway counts from its start. The first counts of a gateway are the base of the next ones, so calls that ended
before it was first asked do not count, and neither do those after it was last asked. Counters that went back belong to a
new process at the same address.
"""

import collections
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidegate_operator import gateway_counts
from tidegate_operator.spec import Json

WINDOW_S = 3600.0
WINDOW = "1h"
SLICE_S = 300.0
MOST_CLASSES = 256
"""Of a gateway; a pool has 64 at most."""
MOST_CALLS = 2**53
"""That a gateway can have counted."""


class Counts(NamedTuple):
    """Ended calls that had a target."""

    met: int = 0
    with_target: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One class over the window."""

    attainment: float
    """The share of the calls with a target that met it."""
    left: float
    """1: no target was missed. 0: as many as the objective allows. Negative: more."""


def parse(state: Json) -> dict[str, Counts]:
    """By class, the counts in the answer of GET /admin/state. Raises KeyError, TypeError, ValueError, AttributeError;
    ValueError also for counts that no gateway can have."""
    found = itertools.islice(state["targets"].items(), MOST_CLASSES)
    return {name: _counts(int(seen["met"]), int(seen["with_target"])) for name, seen in found}


def _counts(met: int, with_target: int) -> Counts:
    if not 0 <= met <= with_target <= MOST_CALLS:
        raise ValueError(f"{met} of {with_target} calls met their target")
    return Counts(met, with_target)


class ErrorBudgets:
    """The counts of one pool."""

    def __init__(self) -> None:
        self._last: gateway_counts.LatestCounts[Mapping[str, Counts]] = gateway_counts.LatestCounts()
        """By class."""
        self._slices: collections.deque[tuple[float, dict[str, Counts]]] = collections.deque()
        """The counts of slices of time by the instants at which they began, oldest first."""

    def add(
        self,
        now: float,
        seen: Mapping[str, Mapping[str, Counts]],
        *,
        gateways: Collection[str],
        classes: Collection[str],
    ) -> None:
        """Takes in what gateways have counted since their start, by gateway and class. `gateways` are all that are ready;
        the others are forgotten. Names that are none of `classes` are passed over: a gateway may invent any number."""
        if not self._slices or now >= self._slices[-1][0] + SLICE_S:
            self._slices.append((now, {}))
        while self._slices[0][0] <= now - WINDOW_S:
            self._slices.popleft()
        totals = self._slices[-1][1]
        for before, counts in self._last.add(seen, gateways=gateways):
            add_since(totals, before, {name: counts[name] for name in classes if name in counts})

    def of_class(self, name: str, objective: float) -> Budget | None:
        """The budget of a class whose objective is given in percent; None without a call that had a target."""
        parts = [totals[name] for _, totals in self._slices if name in totals]
        met, with_target = sum(part.met for part in parts), sum(part.with_target for part in parts)
        if not with_target:
            return None
        missed = 1 - met / with_target
        return Budget(attainment=1 - missed, left=1 - missed / (1 - objective / 100))


def add_since(totals: dict[str, Counts], before: Mapping[str, Counts], now: Mapping[str, Counts]) -> None:
    """Adds what a gateway has counted between two answers to `totals`, by class."""
    for name, counts in now.items():
        new, old = _since(before.get(name, Counts()), counts), totals.get(name, Counts())
        totals[name] = Counts(old.met + new.met, old.with_target + new.with_target)


def _since(before: Counts, now: Counts) -> Counts:
    if now.with_target < before.with_target or now.met < before.met:
        return now
    return Counts(now.met - before.met, now.with_target - before.with_target)
