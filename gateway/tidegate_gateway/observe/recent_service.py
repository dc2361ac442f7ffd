"""How well were calls served lately? Tallies of the calls that ended, over the last minutes and since the start.

The status page, `tidegate top` and the history of the policy read them. Time is cut into slices of `SLICE_S` seconds; a
switch of the policy begins a slice, so that the time before and the time after it do not mix.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

SLICE_S = 5.0
KEPT_S = 300.0
"""The time that the slices cover."""

Outcome = Literal["met", "late", "shed", "failed"]
"""The end of a call that had a target."""


@dataclass(slots=True)
class Tally:
    """Calls that ended."""

    calls: int = 0
    """Calls that were answered."""
    tokens: int = 0
    """Tokens that engines generated."""
    answer_s: float = 0.0
    """Seconds from arrival to the last token, of all answered calls together."""
    met: int = 0
    late: int = 0
    shed: int = 0
    failed: int = 0

    @property
    def with_target(self) -> int:
        return self.met + self.late + self.shed + self.failed

    @property
    def met_ratio(self) -> float | None:
        """The share of the calls with a target that met it; None without such a call."""
        return self.met / self.with_target if self.with_target else None

    @property
    def mean_answer_s(self) -> float | None:
        return self.answer_s / self.calls if self.calls else None

    def count(self, tokens: int, answer_s: float | None, outcome: Outcome | None) -> None:
        """Counts the end of one call; without `answer_s` it was not answered, without an `outcome` it had no target."""
        self.tokens += tokens
        if answer_s is not None:
            self.calls += 1
            self.answer_s += answer_s
        if outcome == "met":
            self.met += 1
        elif outcome == "late":
            self.late += 1
        elif outcome == "shed":
            self.shed += 1
        elif outcome == "failed":
            self.failed += 1

    def add(self, other: "Tally") -> None:
        self.calls += other.calls
        self.tokens += other.tokens
        self.answer_s += other.answer_s
        self.met += other.met
        self.late += other.late
        self.shed += other.shed
        self.failed += other.failed


@dataclass(slots=True)
class Slice:
    """The calls that ended in one slice of time."""

    began_at_s: float
    classes: dict[str, Tally] = field(default_factory=dict)
    tenants: dict[str, Tally] = field(default_factory=dict)


class RecentService:
    """The tallies of one gateway."""

    def __init__(self) -> None:
        self._slices: collections.deque[Slice] = collections.deque()
        self._earlier: collections.defaultdict[str, Tally] = collections.defaultdict(Tally)
        """By class: all slices since the start, except the last one."""

    def add(
        self, now: float, slo_class: str, tenant: str, *, tokens: int, answer_s: float | None, outcome: Outcome | None
    ) -> None:
        """A call ended. The names are bounded labels."""
        if not self._slices or now // SLICE_S != self._slices[-1].began_at_s // SLICE_S:
            self.cut(now)
        current = self._slices[-1]
        for tallies, name in ((current.classes, slo_class), (current.tenants, tenant)):
            tally = tallies.get(name)
            if tally is None:
                tally = tallies[name] = Tally()
            tally.count(tokens, answer_s, outcome)

    def cut(self, now: float) -> None:
        """Begins a slice."""
        if self._slices:
            for name, tally in self._slices[-1].classes.items():
                self._earlier[name].add(tally)
        self._slices.append(Slice(now))
        while now - self._slices[0].began_at_s > KEPT_S + SLICE_S:
            self._slices.popleft()

    def between(self, from_at_s: float, until_at_s: float) -> Tally:
        """All calls of the slices that began in this time."""
        return _sum(each for each in self._slices if from_at_s <= each.began_at_s < until_at_s)

    def since_start(self) -> dict[str, Tally]:
        """By class, all calls since the gateway started."""
        return _merged([self._earlier, self._slices[-1].classes if self._slices else {}])

    def by_class(self, now: float) -> dict[str, Tally]:
        """The calls of the last `KEPT_S` seconds."""
        return _merged(each.classes for each in self._kept(now))

    def by_tenant(self, now: float) -> dict[str, Tally]:
        """The calls of the last `KEPT_S` seconds."""
        return _merged(each.tenants for each in self._kept(now))

    def series(self, now: float) -> list[Tally]:
        """All calls of the last `KEPT_S` seconds in steps of `SLICE_S`, oldest first; the last step is not over yet."""
        steps = [Tally() for _ in range(round(KEPT_S / SLICE_S))]
        last = now // SLICE_S
        for each in self._kept(now):
            index = round(last - each.began_at_s // SLICE_S)
            if 0 <= index < len(steps):
                steps[-1 - index].add(_sum([each]))
        return steps

    def _kept(self, now: float) -> Iterable[Slice]:
        return itertools.dropwhile(lambda each: each.began_at_s < now - KEPT_S, self._slices)


def _sum(slices: Iterable[Slice]) -> Tally:
    total = Tally()
    for each in slices:
        for tally in each.classes.values():
            total.add(tally)
    return total


def _merged(slices: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    total: collections.defaultdict[str, Tally] = collections.defaultdict(Tally)
    for tallies in slices:
        for name, tally in tallies.items():
            total[name].add(tally)
    return dict(total)
