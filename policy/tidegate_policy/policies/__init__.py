"""The scheduling policies, and the one registry of their names.

`policy_contract` says what a policy must answer. Each other module is one policy. `waiting_queue` keeps waiting calls in
the order of a policy. `POLICIES` is the only list of names; gateway, engines, operator and benchmarks read it.
"""

import math
from collections.abc import Mapping

from tidegate_policy.policies.edf import Edf
from tidegate_policy.policies.fcfs import Fcfs
from tidegate_policy.policies.policy_contract import (
    NONE_CHANGED,
    Changed,
    Computed,
    History,
    Key,
    Parameter,
    Policy,
    QueuedRequest,
    StaticPolicy,
    Turns,
    hears,
    replay,
)
from tidegate_policy.policies.priority import Priority
from tidegate_policy.policies.sjf import Sjf
from tidegate_policy.policies.two_lane import TwoLane
from tidegate_policy.policies.urgency import Urgency

POLICIES: dict[str, type[StaticPolicy]] = {
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
"""The policy that needs no prediction. Steering returns to it when no other policy can be trusted."""


class UnknownPolicy(ValueError):
    """The name is not in `POLICIES`; the message lists the names that are."""


class BadParameter(ValueError):
    """The policy has no such parameter, or the value is out of range; the message gives the range."""


def create(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    """A new policy object. Parameters that are not given take their default. Raises `UnknownPolicy`, `BadParameter`."""
    kind = POLICIES.get(name)
    if kind is None:
        raise UnknownPolicy(f"unknown policy {name!r}; known are {', '.join(sorted(POLICIES))}")
    given = dict(parameters or {})
    declared = {parameter.name: parameter for parameter in kind.PARAMETERS}
    for key, value in given.items():
        if key not in declared:
            known = f"known are {', '.join(sorted(declared))}" if declared else "it has none"
            raise BadParameter(f"policy {name!r} has no parameter {key!r}; {known}")
        low, high = declared[key].low, declared[key].high
        if not (math.isfinite(value) and low <= value <= high):
            raise BadParameter(
                f"parameter {key!r} of policy {name!r} must be between {low:g} and {high:g} ({declared[key].unit}), "
                f"not {value:g}"
            )
    return kind(**given)


__all__ = [
    "DEFAULT",
    "NONE_CHANGED",
    "POLICIES",
    "SAFE",
    "BadParameter",
    "Changed",
    "Computed",
    "History",
    "Key",
    "Parameter",
    "Policy",
    "QueuedRequest",
    "StaticPolicy",
    "Turns",
    "UnknownPolicy",
    "create",
    "hears",
    "replay",
]
