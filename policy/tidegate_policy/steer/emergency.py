"""Does the pool need the safe policy at once? The loop asks at every observation, whatever its selector is (H-MAS C.2).

An emergency is a state in which no order of the calls helps and the loop must not experiment.
"""

from tidegate_policy import policies
from tidegate_policy.qos import Qos
from tidegate_policy.steer.proposal import Proposal

ENOUGH = 20
"""Finished calls that a window must have."""
THRASH = 5.0
"""Preemptions for each finished call. An engine whose KV is full has up to three under every policy, while long answers
finish (docs/benchmarks-steering.md): only above this value it mostly repeats work."""


def found(qos: Qos, active: str) -> Proposal | None:
    """The proposal of a bypass; None without an emergency, or when the safe policy is active already."""
    if active == policies.SAFE:
        return None
    if qos.engines and qos.silent * 2 > qos.engines + qos.silent:
        return _bypass(f"silence: {qos.silent} of {qos.engines + qos.silent} engines do not report")
    if qos.finished >= ENOUGH and qos.preemptions > THRASH * qos.finished:
        return _bypass(f"thrashing: {qos.preemptions} preemptions for {qos.finished} finished calls")
    return None


def _bypass(reason: str) -> Proposal:
    return Proposal(policy=policies.SAFE, reason=reason, emergency=True)
