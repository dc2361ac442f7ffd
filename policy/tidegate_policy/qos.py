"""The quality of service that engines delivered over a window, in summaries that merge by addition (H-MAS 3.3).

Each engine reports one `Qos` for each period. Summaries of several engines, or of several periods, add up, so the same
value serves as the paper's `V_short` (one period, all engines) and `V_long` (many periods). `steer` judges the
summaries.
"""

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

BOUNDS_S: tuple[float, ...] = tuple(0.001 * 2 ** (index / 2) for index in range(48))
"""Upper bounds of the buckets in seconds, from 1 ms to three hours; a last bucket takes the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of durations in buckets spaced by the square root of two."""

    counts: tuple[int, ...] = ()
    """One for each bucket up to the last that is not empty."""
    sum_s: float = 0.0

    def __add__(self, other: "Histogram") -> "Histogram":
        length = max(len(self.counts), len(other.counts))
        mine, theirs = (side.counts + (0,) * (length - len(side.counts)) for side in (self, other))
        return Histogram(counts=tuple(a + b for a, b in zip(mine, theirs, strict=True)), sum_s=self.sum_s + other.sum_s)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0

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
    def dispersion(self) -> float:
        """Standard deviation over mean, from the buckets' geometric middles; 0 when empty."""
        if not self.count:
            return 0.0
        middles = [bound / 2**0.25 for bound in (*BOUNDS_S, BOUNDS_S[-1] * 2)]
        mean = sum(c * m for c, m in zip(self.counts, middles, strict=False)) / self.count
        variance = sum(c * (m - mean) ** 2 for c, m in zip(self.counts, middles, strict=False)) / self.count
        return math.sqrt(variance) / mean


@dataclass(slots=True)
class Tally:
    """A histogram that is still being written."""

    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one duration; negative ones count as zero."""
        index = bisect.bisect_left(BOUNDS_S, seconds)
        self.counts.extend([0] * (index + 1 - len(self.counts)))
        self.counts[index] += 1
        self.sum_s += max(seconds, 0.0)

    def freeze(self) -> Histogram:
        return Histogram(counts=tuple(self.counts), sum_s=self.sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantService:
    """The service that one tenant received."""

    weight: float = 1.0
    served_tokens: int = 0
    waiting: int = 0

    def __add__(self, other: "TenantService") -> "TenantService":
        return TenantService(
            weight=max(self.weight, other.weight),
            served_tokens=self.served_tokens + other.served_tokens,
            waiting=self.waiting + other.waiting,
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
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Highest share of KV in use among the engines."""
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

    @property
    def miss_ratio(self) -> float:
        return self.missed / self.with_target if self.with_target else 0.0

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
    """`now`: levels (running, waiting, silent) are of the same instant and add up; else `b` is the later one."""
    tenants = dict(a.tenants)
    for name, service in b.tenants.items():
        tenants[name] = tenants[name] + service if name in tenants else service
    return Qos(
        engines=engines,
        silent=a.silent + b.silent if now else b.silent,
        window_s=window_s,
        arrived=a.arrived + b.arrived,
        finished=a.finished + b.finished,
        running=a.running + b.running if now else b.running,
        waiting=a.waiting + b.waiting if now else b.waiting,
        kv_usage=max(a.kv_usage, b.kv_usage) if now else b.kv_usage,
        preemptions=a.preemptions + b.preemptions,
        ttft=a.ttft + b.ttft,
        tpot=a.tpot + b.tpot,
        service=a.service + b.service,
        with_target=a.with_target + b.with_target,
        missed=a.missed + b.missed,
        blocked=a.blocked + b.blocked,
        tenants=tenants,
    )
