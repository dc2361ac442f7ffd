"""The quality of service that engines delivered over a window, in summaries that merge by addition (H-MAS 3.3).

Each engine reports one `Qos` for each period. Summaries of several engines, or of several periods, add up, so the same
value serves as the paper's `V_short` (one period, all engines) and `V_long` (many periods). `steer` judges the
summaries.
"""

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

BOUNDS_S: tuple[float, ...] = tuple(0.001 * 2 ** (index / 2) for index in range(48))
"""Upper bounds of the buckets in seconds, from 1 ms to three hours; a last bucket takes the rest."""
_MIDDLES_S = tuple(bound / 2**0.25 for bound in (*BOUNDS_S, BOUNDS_S[-1] * 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of durations in buckets spaced by the square root of two."""

    counts: tuple[int, ...] = ()
    """One for each bucket up to the last that is not empty."""

    def __add__(self, other: "Histogram") -> "Histogram":
        length = max(len(self.counts), len(other.counts))
        mine, theirs = (side.counts + (0,) * (length - len(side.counts)) for side in (self, other))
        return Histogram(counts=tuple(a + b for a, b in zip(mine, theirs, strict=True)))

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


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantService:
    """The service that one tenant received."""

    weight: float = 1.0
    served_tokens: int = 0
    waiting: int = 0
    targets: Targets = field(default_factory=Targets)

    def __add__(self, other: "TenantService") -> "TenantService":
        return TenantService(
            weight=max(self.weight, other.weight),
            served_tokens=self.served_tokens + other.served_tokens,
            waiting=self.waiting + other.waiting,
            targets=self.targets + other.targets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
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


def across(reports: Iterable[Qos]) -> Qos:
    """Several engines over the same window: counts add up, the window stays."""
    return reduce(
        lambda a, b: _add(a, b, max(a.window_s, b.window_s), a.engines + b.engines, now=True), reports, NOTHING
    )


def over_time(reports: Iterable[Qos]) -> Qos:
    """The same engines over consecutive windows, oldest first: windows add up, levels are the newest."""
    return reduce(lambda a, b: _add(a, b, a.window_s + b.window_s, b.engines, now=False), reports, NOTHING)


def _add(a: Qos, b: Qos, window_s: float, engines: int, *, now: bool) -> Qos:
    """`now`: levels (waiting, silent) are of the same instant and add up; else `b` is the later one."""
    tenants = a.tenants if now else {name: replace(service, waiting=0) for name, service in a.tenants.items()}
    return Qos(
        engines=engines,
        silent=a.silent + b.silent if now else b.silent,
        window_s=window_s,
        arrived=a.arrived + b.arrived,
        finished=a.finished + b.finished,
        waiting=a.waiting + b.waiting if now else b.waiting,
        preemptions=a.preemptions + b.preemptions,
        ttft=a.ttft + b.ttft,
        tpot=a.tpot + b.tpot,
        service=a.service + b.service,
        with_target=a.with_target + b.with_target,
        missed=a.missed + b.missed,
        blocked=a.blocked + b.blocked,
        tenants=_merged(tenants, b.tenants),
        classes=_merged(a.classes, b.classes),
    )


_Part = TypeVar("_Part", Targets, TenantService)


def _merged(a: Mapping[str, _Part], b: Mapping[str, _Part]) -> dict[str, _Part]:
    both = dict(a)
    for name, part in b.items():
        both[name] = both[name] + part if name in both else part
    return both
