"""The policy pool: which waiting call goes next?

An order gives each call a *lane* and, within the lane, an immutable *key* (smaller goes first; ties go by arrival in the
queue). A key never depends on the current time, so a queue is a heap that needs no re-sorting while time passes. An
order with several lanes also owns a *gate*, the only state there is, which says whose turn it is. `waiting` keeps the
queue, `POLICIES` is the one list of names.
"""

from collections.abc import Callable

from tidegate_policy.policies.edf import Edf
from tidegate_policy.policies.fcfs import Fcfs
from tidegate_policy.policies.policy_contract import FreeGate, Gate, Key, Policy, QueuedRequest
from tidegate_policy.policies.priority import Priority
from tidegate_policy.policies.sjf import Sjf
from tidegate_policy.policies.two_lane import TwoLane
from tidegate_policy.policies.urgency import Urgency

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "edf": Edf,
    "sjf": Sjf,
    "two-lane": TwoLane,
    "urgency": Urgency,
    "priority": Priority,
}


DEFAULT = "urgency"
"""The policy that gateways, engines, steering and benchmarks start with unless a setting names another."""
SAFE = "fcfs"
"""The policy that needs no prediction: the way back when no other one can be trusted."""


class UnknownPolicy(ValueError):
    """A policy name that is not in the pool; the message lists those that are."""


def named(name: str) -> Policy:
    """A fresh order (gate state included) by its public name. Raises `UnknownPolicy`."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise UnknownPolicy(f"unknown policy {name!r}; known are {', '.join(sorted(POLICIES))}") from None


__all__ = ["POLICIES", "FreeGate", "Gate", "Key", "Policy", "QueuedRequest", "UnknownPolicy", "named"]
