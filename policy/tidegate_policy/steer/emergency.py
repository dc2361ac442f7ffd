"""Does the pool need the safe policy at once? The loop asks at every observation, whatever its selector is (H-MAS C.2).

An emergency is a state in which no order of the calls helps and the loop must not experiment. No single engine of several
can claim one: the others must show it too.
"""

from collections.abc import Collection

from tidegate_policy import policies
from tidegate_policy.qos import Qos
from tidegate_policy.steer.proposal import Proposal

ENOUGH = 20
"""Finished calls that a window must have."""
THRASH = 5.0
"""Preemptions for each finished call. An engine whose KV is full has up to three under every policy, while long answers
finish (docs/benchmarks-steering.md): only above this value it mostly repeats work."""


def found(qos: Qos, reports: Collection[Qos]) -> Proposal | None:
    """The proposal of a bypass, also while the safe policy is active; None without an emergency. `qos` is the sum of the
    `reports` of the engines."""
    if qos.engines and qos.silent * 2 > qos.engines + qos.silent:
        return _bypass(f"silence: {qos.silent} of {qos.engines + qos.silent} engines do not report")
    if _thrashes(reports, ENOUGH) and _thrashes(_without_worst(reports), ENOUGH // 2):
        return _bypass(f"thrashing: {qos.preemptions} preemptions for {qos.finished} finished calls")
    return None


def _thrashes(reports: Collection[Qos], enough: int) -> bool:
    finished = sum([report.finished for report in reports])
    return finished >= enough and sum([report.preemptions for report in reports]) > THRASH * finished


def _without_worst(reports: Collection[Qos]) -> Collection[Qos]:
    """All but the engine with the most preemptions; the same engine if there is only one."""
    if len(reports) < 2:
        return reports
    return sorted(reports, key=lambda report: report.preemptions)[:-1]


def _bypass(reason: str) -> Proposal:
    return Proposal(policy=policies.SAFE, reason=reason, emergency=True)
