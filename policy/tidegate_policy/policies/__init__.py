"""The scheduling policies, and the one registry of their names.

`policy_contract` says what a policy must answer. Each other module is one policy. `waiting_queue` keeps waiting calls in
the order of a policy. `POLICIES` is the only list of names; gateway, engines, operator and benchmarks read it.
"""

import math
from collections.abc import Mapping

from tidegate_policy.policies.augmented_policy import Augmented
from tidegate_policy.policies.cfs import Cfs
from tidegate_policy.policies.edf import Edf
from tidegate_policy.policies.fcfs import Fcfs
from tidegate_policy.policies.llf import Llf
from tidegate_policy.policies.lottery import Lottery
from tidegate_policy.policies.mlfq import Mlfq
from tidegate_policy.policies.policy_contract import (
    GENERIC_COST,
    NONE_CHANGED,
    ONE_OUTPUT,
    Changed,
    Computed,
    History,
    Key,
    Parameter,
    Policy,
    QueuedRequest,
    SchedulerContext,
    StaticPolicy,
    Turns,
    hears,
    replay,
    replay_arrivals,
    replay_service,
)
from tidegate_policy.policies.priority import Priority
from tidegate_policy.policies.relquery_policy import RelQuery
from tidegate_policy.policies.rr import Rr
from tidegate_policy.policies.semantic_policy import Semantic
from tidegate_policy.policies.sjf import Sjf
from tidegate_policy.policies.srtf import Srtf
from tidegate_policy.policies.stride import Stride
from tidegate_policy.policies.two_lane import TwoLane
from tidegate_policy.policies.urgency import Urgency
from tidegate_policy.policies.wfq import Wfq

POLICIES: dict[str, type[StaticPolicy]] = {
    "fcfs": Fcfs,
    "edf": Edf,
    "llf": Llf,
    "sjf": Sjf,
    "srtf": Srtf,
    "two-lane": TwoLane,
    "wfq": Wfq,
    "stride": Stride,
    "lottery": Lottery,
    "cfs": Cfs,
    "rr": Rr,
    "mlfq": Mlfq,
    "priority": Priority,
    "urgency": Urgency,
    "semantic": Semantic,
    "relquery": RelQuery,
    "augmented": Augmented,
}

DEFAULT = "urgency"
"""The policy that gateways, engines, steering and benchmarks start with unless a setting names another."""
SAFE = "fcfs"
"""The policy that needs no prediction. Steering returns to it when no other policy can be trusted."""


class UnknownPolicy(ValueError):
    """The name is not in `POLICIES`; the message lists the names that are."""


class BadParameter(ValueError):
    """The policy has no such parameter, or the value is out of range; the message gives the range."""


def create(name: str, parameters: Mapping[str, float] | None = None, context: SchedulerContext | None = None) -> Policy:
    """A new policy object. Parameters that are not given take their default; without a context the policy knows a generic
    engine. Raises `UnknownPolicy`, `BadParameter`."""
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
    return kind(context=context, **given)


__all__ = [
    "DEFAULT",
    "GENERIC_COST",
    "NONE_CHANGED",
    "ONE_OUTPUT",
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
    "SchedulerContext",
    "StaticPolicy",
    "Turns",
    "UnknownPolicy",
    "create",
    "hears",
    "replay",
    "replay_arrivals",
    "replay_service",
]
