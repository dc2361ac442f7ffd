"""The default selector: a short table from symptoms to policies (after H-MAS C.2).

Each rule names a symptom, the evidence for it, and the policies that cure it, best first. The first rule whose evidence
holds and that has an allowed policy proposes it. Without a symptom nothing is proposed: a policy that works stays.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tidegate_policy import policies
from tidegate_policy.qos import Qos
from tidegate_policy.steer.proposal import Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The selector. Its fields say how much evidence a symptom needs."""

    enough: int = 20
    """Calls that a window must have seen before it counts as evidence."""
    miss_ratio: float = 0.05
    """Share of the calls with a target that missed their target."""
    block_ratio: float = 0.2
    """Share of the calls that waited longer than twice their own work."""
    dispersion: float = 1.0
    """Standard deviation over mean of the calls' work: above this value, short calls can wait behind long ones."""
    overload: float = 1.5
    """Arrivals over completions while a queue stands."""
    thrash: float = 0.5
    """Preemptions for each completed call: above this value the engine mostly repeats work."""

    def propose(self, qos: Qos, active: str, allow: Collection[str]) -> Proposal | None:
        """The policy that cures the symptoms in `qos`; None without a symptom, or when `active` is the cure already."""
        if qos.engines and qos.silent * 2 > qos.engines + qos.silent:
            return _emergency(active, f"{qos.silent} of {qos.engines + qos.silent} engines do not report")
        if qos.finished >= self.enough and qos.preemptions > self.thrash * qos.finished:
            return _emergency(active, f"{qos.preemptions} preemptions for {qos.finished} finished calls")
        if qos.ttft.count + qos.waiting < self.enough or not qos.waiting:
            return None
        misses = qos.with_target >= self.enough and qos.miss_ratio >= self.miss_ratio
        overload = qos.arrived > self.overload * max(qos.finished, 1)
        blocking = qos.block_ratio >= self.block_ratio and qos.service.dispersion >= self.dispersion
        if blocking:
            evidence = f"{qos.block_ratio:.0%} of calls waited longer than twice their own work"
            return _first_allowed(("two-lane", "sjf"), active, allow, evidence)
        if misses and overload:
            evidence = f"{qos.miss_ratio:.0%} of targets missed, {qos.arrived} calls came and {qos.finished} finished"
            return _first_allowed(("sjf", "two-lane"), active, allow, evidence)
        if misses:
            return _first_allowed(("edf", "urgency"), active, allow, f"{qos.miss_ratio:.0%} of targets missed")
        return None


def _emergency(active: str, reason: str) -> Proposal | None:
    return None if active == policies.SAFE else Proposal(policy=policies.SAFE, reason=reason, emergency=True)


def _first_allowed(cures: tuple[str, ...], active: str, allow: Collection[str], reason: str) -> Proposal | None:
    allowed = [cure for cure in cures if cure in allow]
    if not allowed or active == allowed[0]:
        return None
    return Proposal(policy=allowed[0], reason=reason)
