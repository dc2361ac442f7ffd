"""The default selector: a short table from symptoms to orders (after H-MAS C.2).

Each rule names a symptom, the evidence for it, and the orders that cure it, best first; the first rule whose evidence
holds and that has an allowed order proposes it. With no symptom nothing is proposed: an order that works stays.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tidegate_policy.qos import Qos

START = "sjf"
"""The order a pool starts with where it is allowed (H-MAS C.2)."""
SAFE = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What counts as evidence."""

    enough: int = 20
    """Calls that a window must have seen before it proves anything."""
    miss_ratio: float = 0.05
    """Share of the calls with a target that missed it."""
    block_ratio: float = 0.2
    """Share of the calls that waited longer than twice their own work."""
    dispersion: float = 1.0
    """Standard deviation over mean of the calls' work: above it, short calls can stand behind long ones."""
    overload: float = 1.5
    """Arrivals over completions while a queue stands."""
    thrash: float = 0.5
    """Preemptions a completed call: above it the engine redoes work instead of doing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An order and the evidence for it; `emergency` asks the guards for a bypass."""

    policy: str
    reason: str
    emergency: bool = False


def propose(qos: Qos, active: str, allow: Collection[str], thresholds: Thresholds) -> Proposal | None:
    """The order that the symptoms in `qos` ask for; None when there is none, or `active` is the cure already."""
    if qos.engines and qos.silent * 2 > qos.engines + qos.silent:
        return _emergency(active, f"{qos.silent} of {qos.engines + qos.silent} engines do not report")
    if qos.finished >= thresholds.enough and qos.preemptions > thresholds.thrash * qos.finished:
        return _emergency(active, f"{qos.preemptions} preemptions for {qos.finished} finished calls")
    if qos.ttft.count + qos.waiting < thresholds.enough or not qos.waiting:
        return None
    misses = qos.with_target >= thresholds.enough and qos.miss_ratio >= thresholds.miss_ratio
    overload = qos.arrived > thresholds.overload * max(qos.finished, 1)
    blocking = qos.block_ratio >= thresholds.block_ratio and qos.service.dispersion >= thresholds.dispersion
    if blocking:
        evidence = f"{qos.block_ratio:.0%} of calls waited longer than twice their own work"
        return _first_allowed(("two-lane", "sjf"), active, allow, evidence)
    if misses and overload:
        evidence = f"{qos.miss_ratio:.0%} of targets missed, {qos.arrived} calls came and {qos.finished} finished"
        return _first_allowed(("sjf", "two-lane"), active, allow, evidence)
    if misses:
        return _first_allowed(("edf", "urgency"), active, allow, f"{qos.miss_ratio:.0%} of targets missed")
    return None


def start(allow: Collection[str]) -> str:
    """The order a pool begins with."""
    return START if START in allow else SAFE


def _emergency(active: str, reason: str) -> Proposal | None:
    return None if active == SAFE else Proposal(policy=SAFE, reason=reason, emergency=True)


def _first_allowed(cures: tuple[str, ...], active: str, allow: Collection[str], reason: str) -> Proposal | None:
    allowed = [cure for cure in cures if cure in allow]
    if not allowed or active == allowed[0]:
        return None
    return Proposal(policy=allowed[0], reason=reason)
