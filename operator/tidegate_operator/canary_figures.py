"""How have new and old engines served since the step of a canary began? From the states of the gateways.

Pure. Gateways count from the first division of their calls. The first counts of a gateway are the base of the next ones,
and counts that went back belong to a new process at the same address.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace

from tidegate_operator import gateway_counts
from tidegate_operator.spec import Json
from tidegate_policy.rollout import side_by_side
from tidegate_policy.rollout.side_by_side import Service

EngineServices = Mapping[str, Service]
"""By the name of an engine: what it has done."""


def parse(state: Json) -> dict[str, Service]:
    """The counts in the answer of GET /admin/state. Raises KeyError, TypeError, ValueError."""
    return {str(engine["name"]): _service(engine["service"]) for engine in state["engines"]}


class CanaryFigures:
    """The sums over all gateways of a pool."""

    def __init__(self) -> None:
        self._last: gateway_counts.LatestCounts[EngineServices] = gateway_counts.LatestCounts()
        self._sums: dict[str, Service] = {}
        """By engine, since `begin`."""

    def begin(self) -> None:
        """A step begins."""
        self._sums = {}

    def add(
        self,
        seen: Mapping[str, EngineServices],
        *,
        gateways: Collection[str],
        engines: Set[str],
        classes: Collection[str],
    ) -> None:
        """Takes in what gateways report, by address. `gateways` are all that are ready; the others are forgotten. Names
        that are none of `engines` and of `classes` are passed over: a gateway may invent any number."""
        for before, services in self._last.add(seen, gateways=gateways):
            for name in services.keys() & engines:
                new = _of_classes(_since(before.get(name, Service()), services[name]), classes)
                self._sums[name] = self._sums.get(name, Service()) + new

    def of(self, engines: Iterable[str]) -> Service:
        """What these engines have done since the step began."""
        return sum((self._sums.get(name, Service()) for name in engines), Service())


def _of_classes(service: Service, classes: Collection[str]) -> Service:
    return replace(service, targets={name: service.targets[name] for name in classes if name in service.targets})


def _since(before: Service, now: Service) -> Service:
    return now if now.calls < before.calls else now - before


def _service(item: Json) -> Service:
    return Service(
        calls=int(item["calls"]),
        errors=int(item["errors"]),
        ttft=_times(item["ttft"]),
        tpot=_times(item["tpot"]),
        targets={
            str(name): side_by_side.Targets(with_target=int(seen["with_target"]), missed=int(seen["missed"]))
            for name, seen in item["targets"].items()
        },
    )


def _times(item: Json) -> side_by_side.Times:
    return side_by_side.Times(count=int(item["count"]), log_sum=float(item["log_sum"]))
