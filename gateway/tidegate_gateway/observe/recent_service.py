"""How well were calls served lately? Tallies of the calls that ended, over the last minutes and since the start.

The status page, `tidegate top` and the history of the policy read them. Time is cut into slices of `SLICE_S` seconds; a
switch of the policy begins a slice, so that the time before and the time after it do not mix.
"""

import collections
import math
from dataclasses import dataclass, field
from typing import Any, Literal

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

    def summary(self) -> dict[str, Any]:
        """As JSON: the calls, their share of met targets, and their mean time."""
        met, answer_s = self.met_ratio, self.mean_answer_s
        return {
            "answered": self.calls,
            "with_target": self.with_target,
            "met_ratio": None if met is None else round(met, 4),
            "answer_s": None if answer_s is None else round(answer_s, 3),
        }

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

    def add(self, other: "Tally", sign: int = 1) -> None:
        """Adds another tally, or takes it away with a `sign` of -1."""
        self.calls += sign * other.calls
        self.tokens += sign * other.tokens
        self.answer_s += sign * other.answer_s
        self.met += sign * other.met
        self.late += sign * other.late
        self.shed += sign * other.shed
        self.failed += sign * other.failed


Tallies = dict[str, Tally]
"""By the name of a class or a tenant."""


@dataclass(slots=True)
class Slice:
    """The calls that ended in one slice of time."""

    began_at_s: float
    classes: Tallies = field(default_factory=dict)
    tenants: Tallies = field(default_factory=dict)

    @property
    def total(self) -> Tally:
        total = Tally()
        for tally in self.classes.values():
            total.add(tally)
        return total


class RecentService:
    """The tallies of one gateway. Sums over slices are kept, so that reading them does not cost a pass over all slices."""

    def __init__(self) -> None:
        self._current = Slice(-math.inf)
        self._closed: collections.deque[tuple[Slice, Tally]] = collections.deque()
        """The slices of the last `KEPT_S` seconds before the current one, with their totals."""
        self._lately = Slice(-math.inf)
        """Their sum."""
        self._ever: Tallies = {}
        """By class: all slices before the current one."""

    def add(
        self, now: float, slo_class: str, tenant: str, *, tokens: int, answer_s: float | None, outcome: Outcome | None
    ) -> None:
        """A call ended. The names are bounded labels."""
        if now // SLICE_S != self._current.began_at_s // SLICE_S:
            self.cut(now)
        for tallies, name in ((self._current.classes, slo_class), (self._current.tenants, tenant)):
            tally = tallies.get(name)
            if tally is None:
                tally = tallies[name] = Tally()
            tally.count(tokens, answer_s, outcome)

    def cut(self, now: float) -> None:
        """Begins a slice."""
        closed = self._current
        _add(self._ever, closed.classes)
        _add(self._lately.classes, closed.classes)
        _add(self._lately.tenants, closed.tenants)
        self._closed.append((closed, closed.total))
        self._current = Slice(now)
        self._forget(now)

    def between(self, from_at_s: float, until_at_s: float) -> Tally:
        """All calls of the slices that began in this time."""
        found = Tally()
        for each, total in (*self._closed, (self._current, self._current.total)):
            if from_at_s <= each.began_at_s < until_at_s:
                found.add(total)
        return found

    def since_start(self) -> Tallies:
        """By class, all calls since the gateway started."""
        return _sum(self._ever, self._current.classes)

    def by_class(self, now: float) -> Tallies:
        """The calls of about the last `KEPT_S` seconds."""
        self._forget(now)
        return _sum(self._lately.classes, self._current.classes)

    def by_tenant(self, now: float) -> Tallies:
        """The calls of about the last `KEPT_S` seconds."""
        self._forget(now)
        return _sum(self._lately.tenants, self._current.tenants)

    def series(self, now: float) -> list[Tally]:
        """All calls of the last `KEPT_S` seconds in steps of `SLICE_S`, oldest first; the last step is not over yet."""
        steps = [Tally() for _ in range(round(KEPT_S / SLICE_S))]
        self._forget(now)
        for each, total in (*self._closed, (self._current, self._current.total)):
            ago = now // SLICE_S - each.began_at_s // SLICE_S
            if 0 <= ago < len(steps):
                steps[-1 - int(ago)].add(total)
        return steps

    def _forget(self, now: float) -> None:
        """Takes the slices away whose time is over."""
        if self._current.began_at_s < now - KEPT_S and self._current.classes:
            self.cut(now)
        while self._closed and self._closed[0][0].began_at_s < now - KEPT_S:
            old, _ = self._closed.popleft()
            _add(self._lately.classes, old.classes, -1)
            _add(self._lately.tenants, old.tenants, -1)


def _add(total: Tallies, more: Tallies, sign: int = 1) -> None:
    for name, tally in more.items():
        total.setdefault(name, Tally()).add(tally, sign)


def _sum(one: Tallies, other: Tallies) -> Tallies:
    """Both together, without names that have nothing."""
    total: Tallies = {}
    _add(total, one)
    _add(total, other)
    return {name: tally for name, tally in total.items() if tally.calls or tally.tokens or tally.with_target}
