"""Do new engines serve worse than the old engines that serve beside them? One sentence if they do.

Both sides get calls of the same kind at the same time, because a hash of the call chooses the side
(`dispatch.traffic_split`). So trouble of clients, or of the whole pool, is on both sides and does not count. Times are
compared by their geometric means, because a few long prompts move an arithmetic mean more than an engine does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much worse the new engines may be."""

    min_calls: int = 100
    """Calls on each side before times are compared, and before a step is over."""
    error_share: float = 0.02
    """The share of failed calls may be so much greater."""
    ttft_ratio: float = 1.5
    """The time to the first token may be so many times as long."""
    tpot_ratio: float = 1.5
    """The time for each token may be so many times as long."""
    attainment_drop: float = 0.1
    """The share of the calls of a class that meet their targets may be so much smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Measured times, as the sum of their logarithms."""

    count: int = 0
    log_sum: float = 0.0
    """Sum of the natural logarithms of seconds."""

    def __add__(self, other: "Times") -> "Times":
        return Times(count=self.count + other.count, log_sum=self.log_sum + other.log_sum)

    def __sub__(self, other: "Times") -> "Times":
        return Times(count=self.count - other.count, log_sum=self.log_sum - other.log_sum)

    @property
    def mean_s(self) -> float:
        """The geometric mean in seconds; 0 without a time."""
        return math.exp(self.log_sum / self.count) if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Ended calls of a class that had a target."""

    with_target: int = 0
    missed: int = 0

    def __add__(self, other: "Targets") -> "Targets":
        return Targets(with_target=self.with_target + other.with_target, missed=self.missed + other.missed)

    def __sub__(self, other: "Targets") -> "Targets":
        return Targets(with_target=self.with_target - other.with_target, missed=self.missed - other.missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the engines of one side have done."""

    calls: int = 0
    """Calls that ended there, with an answer or without one. A call that was tried again elsewhere counts on both."""
    errors: int = 0
    """Of `calls`: the engine failed, or rejected the call."""
    ttft: Times = field(default_factory=Times)
    """Seconds from the engine's receipt of a streamed call to its first token."""
    tpot: Times = field(default_factory=Times)
    """Seconds for each further token of a streamed call, and for each token of other calls."""
    targets: Mapping[str, Targets] = field(default_factory=dict)
    """By class."""

    def __add__(self, other: "Service") -> "Service":
        return Service(
            calls=self.calls + other.calls,
            errors=self.errors + other.errors,
            ttft=self.ttft + other.ttft,
            tpot=self.tpot + other.tpot,
            targets={
                name: self.targets.get(name, Targets()) + other.targets.get(name, Targets())
                for name in {**self.targets, **other.targets}
            },
        )

    def __sub__(self, other: "Service") -> "Service":
        return Service(
            calls=self.calls - other.calls,
            errors=self.errors - other.errors,
            ttft=self.ttft - other.ttft,
            tpot=self.tpot - other.tpot,
            targets={name: each - other.targets.get(name, Targets()) for name, each in self.targets.items()},
        )


def fault(new: Service, old: Service, limits: Limits) -> str | None:
    """Why the new engines must not replace the old ones; None while nothing speaks against them.

    Errors and missed targets count from the first one, as a share of at least `min_calls`: an engine that fails all its
    calls soon gets none any more, and would never have as many.
    """
    return (
        _error_fault(new, old, limits)
        or _time_fault("time to the first token", new.ttft, old.ttft, limits.ttft_ratio, limits)
        or _time_fault("time for each token", new.tpot, old.tpot, limits.tpot_ratio, limits)
        or _target_fault(new, old, limits)
    )


def _error_fault(new: Service, old: Service, limits: Limits) -> str | None:
    here, there = _share(new.errors, new.calls, limits), old.errors / max(old.calls, 1)
    if here <= there + limits.error_share:
        return None
    return (
        f"{new.errors} of {new.calls} calls failed at the new engines, and {old.errors} of {old.calls} at the old ones: "
        f"more than {limits.error_share:.3g} above their share"
    )


def _time_fault(name: str, new: Times, old: Times, ratio: float, limits: Limits) -> str | None:
    enough = max(limits.min_calls, 1)
    if new.count < enough or old.count < enough or new.mean_s <= ratio * old.mean_s:
        return None
    return (
        f"the {name} is {_time(new.mean_s)} at the new engines and {_time(old.mean_s)} at the old ones: "
        f"{new.mean_s / max(old.mean_s, 1e-9):.2f} times as long, at most {ratio:g} is allowed"
    )


def _target_fault(new: Service, old: Service, limits: Limits) -> str | None:
    for name, here in sorted(new.targets.items()):
        there = old.targets.get(name, Targets())
        missed = there.missed / max(there.with_target, 1)
        if _share(here.missed, here.with_target, limits) > missed + limits.attainment_drop:
            of_class = f"calls of class {name}" if name else "calls without a class"
            return (
                f"{here.missed} of {here.with_target} {of_class} missed their target at the new engines, and "
                f"{there.missed} of {there.with_target} at the old ones: more than {limits.attainment_drop:.3g} above "
                "their share"
            )
    return None


def _share(part: int, whole: int, limits: Limits) -> float:
    return part / max(whole, limits.min_calls, 1)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
