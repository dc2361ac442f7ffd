"""The default selector: a short table from symptoms to policies (after H-MAS C.2).

Each rule names a symptom, the evidence for it, and the policies that cure it, best first. The first rule whose evidence
holds proposes the first of them that is allowed; where none is, nothing is proposed. Without a symptom nothing is proposed
either: a policy that works stays. The reason of a proposal is the name of its rule and the evidence. `docs/steering.md`
describes the rules.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tidegate_policy.qos import Qos, Targets
from tidegate_policy.steer import features
from tidegate_policy.steer.proposal import Memory, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The selector. Its fields say how much evidence a symptom needs."""

    enough: int = 20
    """Calls that a window must have seen before it counts as evidence."""
    miss_ratio: float = 0.05
    """Share of the calls with a target that missed their target."""
    part_miss_ratio: float = 0.2
    """The same share of one class or one tenant. It is greater, because a pool has many classes and tenants, and few calls
    of each."""
    fairness: float = 0.8
    """Jain's index of the service of the tenants that wait, relative to their weights: below this value some tenants are
    served at the expense of others."""
    block_ratio: float = 0.2
    """Share of the calls that waited longer than twice their own work."""
    dispersion: float = 1.0
    """Standard deviation over mean of the calls' work: above this value, short calls can wait behind long ones."""
    growth: float = 1.5
    """Arrivals over completions: from this value on a backlog follows soon."""
    overload_wait_s: float = 2.0
    """Seconds in which the pool finishes as many calls as wait. From this value on a backlog makes calls late, whatever is
    served first."""
    overload_first_misses: float = 0.02
    """Share of missed targets that is enough with such a backlog. It is small, because a call counts when it finishes, and
    the calls that wait will be late."""
    overload_miss_ratio: float = 0.5
    """Share of the calls of the whole pool that missed their target: from this value on, the calls that wait are late
    already, also without such a backlog. No order by deadlines can meet them."""

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory | None = None) -> Proposal | None:
        """The policy that cures the symptoms in `qos`; None without a symptom, or when `active` is the cure already."""
        if not features.is_evidence(qos, self.enough):
            return None
        if overload := self._overload(qos):
            return _first_allowed(("sjf", "two-lane"), active, allow, overload, "more targets are met, long calls wait")
        if qos.block_ratio >= self.block_ratio and qos.service.dispersion >= self.dispersion:
            evidence = f"blocking: {qos.block_ratio:.0%} of calls waited longer than twice their own work"
            return _first_allowed(("two-lane", "sjf"), active, allow, evidence, "short calls wait less")
        if misses := self._misses(qos):
            return _first_allowed(("edf", "urgency"), active, allow, f"misses: {misses}", "fewer targets are missed")
        fairness = qos.fairness
        if fairness is not None and fairness < self.fairness:
            evidence = f"unfairness: the fairness index of the waiting tenants is {fairness:.2f}"
            return _first_allowed(("wfq", "stride"), active, allow, evidence, "the fairness index rises")
        return None

    def _overload(self, qos: Qos) -> str | None:
        """The evidence that the pool cannot meet all its targets in any order."""
        wait_s = features.wait_s(qos)
        late = qos.with_target >= self.enough and qos.miss_ratio >= self.overload_miss_ratio
        beginning = qos.with_target >= self.enough and qos.miss_ratio >= self.overload_first_misses
        misses = self._misses(qos)
        growing = misses and qos.arrived > self.growth * max(qos.finished, 1)
        if late or growing or (wait_s >= self.overload_wait_s and (beginning or misses)):
            shown = misses or f"{qos.miss_ratio:.0%} of targets missed in {qos.window_s:.0f} s"
            return f"overload: {shown}, {qos.waiting} calls wait, {wait_s:.0f} s at the rate of completions"
        return None

    def _misses(self, qos: Qos) -> str | None:
        """The evidence that too many targets are missed: in the whole pool, or else in its worst class or tenant."""
        if qos.with_target >= self.enough and qos.miss_ratio >= self.miss_ratio:
            return f"{qos.miss_ratio:.0%} of targets missed in {qos.window_s:.0f} s"
        parts = [
            *((f"class {name or 'without a name'}", targets) for name, targets in qos.classes.items()),
            *((f"tenant {name}", service.targets) for name, service in qos.tenants.items()),
        ]
        judged = [part for part in parts if part[1].with_target >= self.enough]
        name, worst = max(judged, key=lambda part: part[1].miss_ratio, default=("", Targets()))
        if worst.miss_ratio < self.part_miss_ratio:
            return None
        return f"{worst.miss_ratio:.0%} of the targets of {name} missed in {qos.window_s:.0f} s"


def _first_allowed(
    cures: tuple[str, ...], active: str, allow: Collection[str], reason: str, expected: str
) -> Proposal | None:
    allowed = [cure for cure in cures if cure in allow]
    if not allowed or active == allowed[0]:
        return None
    return Proposal(policy=allowed[0], reason=reason, alternatives=tuple(allowed[1:]), expected=expected)
