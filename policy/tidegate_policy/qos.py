"""The quality of service that engines delivered over a window, in summaries that merge by addition (H-MAS 3.3).

Each engine reports one `Qos` for each period. Summaries of several engines, or of several periods, add up, so the same
value serves as the paper's `V_short` (one period, all engines) and `V_long` (many periods). `steer` judges the
summaries.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidegate_policy import immutable

BOUNDS_S: tuple[float, ...] = tuple(0.001 * 2 ** (index / 2) for index in range(48))
"""Upper bounds of the buckets in seconds, from 1 ms to three hours; a last bucket takes the rest."""
MOST_TENANTS = 8_192
"""Tenants of a pool whose service is known."""
_MIDDLES_S = tuple(bound / 2**0.25 for bound in (*BOUNDS_S, BOUNDS_S[-1] * 2))
_SQUARES_S2 = tuple(middle_s**2 for middle_s in _MIDDLES_S)


@immutable.value(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of durations in buckets spaced by the square root of two."""

    counts: tuple[int, ...] = ()
    """One for each bucket up to the last that is not empty."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_s(self, q: float) -> float:
        """The q-quantile (q in [0, 1]), interpolated within its bucket; 0 when empty."""
        rank = q * self.count
        seen = 0
        for index, count in enumerate(self.counts):
            if count and seen + count >= rank:
                low = BOUNDS_S[index - 1] if index else 0.0
                high = BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
                return low + max(high - low, 0.0) * (rank - seen) / count
            seen += count
        return 0.0

    @property
    def mean_s(self) -> float:
        """The mean, from the buckets' geometric middles; 0 when empty."""
        total = sum(c * m for c, m in zip(self.counts, _MIDDLES_S, strict=False))
        return total / self.count if self.count else 0.0

    @property
    def squares_s2(self) -> float:
        """The sum of the squares, from the buckets' geometric middles."""
        return sum([count * square for count, square in zip(self.counts, _SQUARES_S2, strict=False) if count])

    @property
    def dispersion(self) -> float:
        """Standard deviation over mean, from the buckets' geometric middles; 0 when empty."""
        if not self.count:
            return 0.0
        mean = self.mean_s
        variance = sum(c * (m - mean) ** 2 for c, m in zip(self.counts, _MIDDLES_S, strict=False)) / self.count
        return math.sqrt(variance) / mean


@dataclass(slots=True)
class Tally:
    """A histogram that is still being written."""

    counts: list[int] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Counts one duration; negative ones count as zero."""
        index = bisect.bisect_left(BOUNDS_S, seconds)
        self.counts.extend([0] * (index + 1 - len(self.counts)))
        self.counts[index] += 1

    def freeze(self) -> Histogram:
        return Histogram(counts=tuple(self.counts))


@immutable.value(frozen=True, slots=True, kw_only=True)
class Targets:
    """Finished calls that had a target."""

    with_target: int = 0
    missed: int = 0
    """Those that missed one of their targets."""

    def __add__(self, other: "Targets") -> "Targets":
        return Targets(with_target=self.with_target + other.with_target, missed=self.missed + other.missed)

    @property
    def miss_ratio(self) -> float:
        return self.missed / self.with_target if self.with_target else 0.0


class TenantService(NamedTuple):
    """The service that one tenant received. A tuple of numbers, because the reports of a large pool have tens of thousands
    of them, and the garbage collector does not follow such tuples."""

    weight: float = 1.0
    served_tokens: int = 0
    waiting: int = 0
    with_target: int = 0
    missed: int = 0
    """Calls that finished with a target, and those of them that missed it."""

    @property
    def targets(self) -> Targets:
        return Targets(with_target=self.with_target, missed=self.missed)


@immutable.value(frozen=True, slots=True, kw_only=True)
class Qos:
    """One engine's window, or the sum of several."""

    engines: int = 1
    silent: int = 0
    """Engines that should have reported and did not."""
    window_s: float = 1.0
    arrived: int = 0
    finished: int = 0
    waiting: int = 0
    preemptions: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    service: Histogram = field(default_factory=Histogram)
    """Predicted seconds of work of the calls that arrived."""
    with_target: int = 0
    missed: int = 0
    blocked: int = 0
    """Calls whose first token took longer than twice their own predicted work."""
    tenants: Mapping[str, TenantService] = field(default_factory=dict)
    classes: Mapping[str, Targets] = field(default_factory=dict)
    """By SLO class; the empty name is the class of calls without one."""

    @property
    def is_idle(self) -> bool:
        """Whether no call arrived, waited, was served or ended."""
        counts = (self.arrived, self.finished, self.waiting, self.preemptions, self.with_target, self.blocked)
        histograms = (self.ttft.counts, self.tpot.counts, self.service.counts)
        return not (any(counts) or any(histograms) or self.tenants or self.classes)

    @property
    def miss_ratio(self) -> float:
        return self.missed / self.with_target if self.with_target else 0.0

    @property
    def fairness(self) -> float | None:
        """Jain's index of the tokens served for each unit of weight, over the tenants that wait: 1 = fair, 1/n = one of n
        tenants received everything. None with fewer than two waiting tenants, or without service."""
        shares = [each.served_tokens / each.weight for each in self.tenants.values() if each.waiting]
        if len(shares) < 2 or not any(shares):
            return None
        return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))

    @property
    def block_ratio(self) -> float:
        return self.blocked / self.ttft.count if self.ttft.count else 0.0


NOTHING = Qos(engines=0, window_s=0.0)


def across(reports: Iterable[Qos], *, tenants: bool = True) -> Qos:
    """Several engines over the same window: counts and levels add up, and the window is the one in the middle, so that an
    engine with a wrong clock does not change it. Without `tenants` a sum of several has none: they are most of the
    work."""
    every = tuple(reports)
    if len(every) == 1:
        return every[0]
    window_s = statistics.median_low([report.window_s for report in every]) if every else 0.0
    return _summed(every, levels_of=every, window_s=window_s, tenants=tenants)


def over_time(reports: Iterable[Qos], *, tenants: bool = True) -> Qos:
    """The same engines over consecutive windows, oldest first: windows and counts add up, levels are the newest.
    `tenants` as for `across`."""
    every = tuple(reports)
    if not every:
        return NOTHING
    if len(every) == 1:
        return every[0]
    window_s = sum([report.window_s for report in every])
    return _summed(every, levels_of=every[-1:], window_s=window_s, tenants=tenants)


def _summed(every: Sequence[Qos], *, levels_of: Sequence[Qos], window_s: float, tenants: bool) -> Qos:
    """The counts of `every`, and the engines and the calls that wait of `levels_of`. One pass over each field, because a
    large pool has hundreds of reports."""
    classes: dict[str, list[int]] = {}
    for report in every:
        for name, targets in report.classes.items():
            found = classes.setdefault(name, [0, 0])
            found[0] += targets.with_target
            found[1] += targets.missed
    return Qos(
        engines=sum([report.engines for report in levels_of]),
        silent=sum([report.silent for report in levels_of]),
        window_s=window_s,
        arrived=sum([report.arrived for report in every]),
        finished=sum([report.finished for report in every]),
        waiting=sum([report.waiting for report in levels_of]),
        preemptions=sum([report.preemptions for report in every]),
        ttft=_histogram([report.ttft for report in every]),
        tpot=_histogram([report.tpot for report in every]),
        service=_histogram([report.service for report in every]),
        with_target=sum([report.with_target for report in every]),
        missed=sum([report.missed for report in every]),
        blocked=sum([report.blocked for report in every]),
        tenants=tenants_of([report.tenants for report in every], [report.tenants for report in levels_of])
        if tenants
        else {},
        classes={name: Targets(with_target=wanted, missed=missed) for name, (wanted, missed) in classes.items()},
    )


def _histogram(parts: Sequence[Histogram]) -> Histogram:
    return Histogram(counts=tuple(map(sum, itertools.zip_longest(*(part.counts for part in parts), fillvalue=0))))


def tenants_of(
    every: Iterable[Mapping[str, TenantService]], levels_of: Iterable[Mapping[str, TenantService]]
) -> dict[str, TenantService]:
    """The sums for each tenant; the calls that wait are those of `levels_of`, and the weight is the greatest. Of more than
    `MOST_TENANTS` those count that come first, so that the time of a decision has a bound."""
    waiting: dict[str, int] = {}
    for tenants in levels_of:
        for name, tenant in tenants.items():
            waiting[name] = waiting.get(name, 0) + tenant.waiting
    sums: dict[str, list[Any]] = {}
    """Weight, served tokens, calls with a target, missed targets."""
    for tenants in every:
        for name, (weight, served, _, wanted, missed) in tenants.items():
            found = sums.get(name)
            if found is None:
                if len(sums) < MOST_TENANTS:
                    sums[name] = [weight, served, wanted, missed]
                continue
            if weight > found[0]:
                found[0] = weight
            found[1] += served
            found[2] += wanted
            found[3] += missed
    return {
        name: TenantService(weight, served, waiting.get(name, 0), wanted, missed)
        for name, (weight, served, wanted, missed) in sums.items()
    }
