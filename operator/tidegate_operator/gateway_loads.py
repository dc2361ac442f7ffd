"""How much work has come to a pool since it was last asked, and what waits? From the states of its gateways.

Pure. A gateway counts from its start. The first counts of a gateway are the base of the next ones. Counts that went back
belong to a new process at the same address.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tidegate_operator import error_budget, gateway_counts
from tidegate_operator.spec import Json
from tidegate_policy.scale import call_load
from tidegate_policy.scale.call_load import CallLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """The load of one gateway."""

    offered: CallLoad
    """The calls that have arrived since its start."""
    waiting: CallLoad
    out: int
    """Its calls at engines."""
    queued: Mapping[str, int]
    """By engine: the calls in its queue, those of all gateways together, as its metrics report them."""
    targets: Mapping[str, error_budget.Counts]
    """By class: the calls that had a target since its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """The load of all gateways of a pool."""

    arrived: CallLoad
    """Since the loads before."""
    waiting: CallLoad
    out: int
    queued: int
    targets: Mapping[str, error_budget.Counts]
    """By class: the calls that ended since the loads before."""


def parse(state: Json) -> GatewayLoad:
    """The load in the answer of GET /admin/state. Raises KeyError, TypeError, ValueError, AttributeError."""
    return GatewayLoad(
        offered=_sums(state["load"]["offered"]),
        waiting=_sums(state["load"]["waiting"]),
        out=int(state["calls"]["out"]),
        queued={str(engine["name"]): int(engine["waiting"] or 0) for engine in state["engines"]},
        targets=error_budget.parse(state),
    )


class GatewayLoads:
    """The loads of the gateways of one pool, from one question to the next."""

    def __init__(self) -> None:
        self._last: gateway_counts.LatestCounts[GatewayLoad] = gateway_counts.LatestCounts()

    def add(self, seen: Mapping[str, GatewayLoad]) -> PoolLoad:
        """What gateways report, by address. A gateway that does not report is forgotten: what arrives meanwhile would later
        seem to have arrived at once."""
        arrived = waiting = call_load.NOTHING
        queued: dict[str, int] = {}
        targets: dict[str, error_budget.Counts] = {}
        for load in seen.values():
            waiting += load.waiting
            for engine, count in load.queued.items():
                queued[engine] = max(queued.get(engine, 0), count)
        for before, load in self._last.add(seen, gateways=seen):
            arrived += _since(before.offered, load.offered)
            error_budget.add_since(targets, before.targets, load.targets)
        return PoolLoad(
            arrived=arrived,
            waiting=waiting,
            out=sum(load.out for load in seen.values()),
            queued=sum(queued.values()),
            targets=targets,
        )


def _sums(item: Json) -> CallLoad:
    return CallLoad(**{field.name: float(item[field.name]) for field in fields(CallLoad)})


def _since(before: CallLoad, now: CallLoad) -> CallLoad:
    return now if now.calls < before.calls else now + before.times(-1)
