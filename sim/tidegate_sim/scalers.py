"""The scalers that the suite `autoscaling` compares: fixed numbers, HorizontalPodAutoscalers, the product's, an oracle.

Each reads what it could read in production. Only the oracle knows which calls will come.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tidegate_policy.cost import scaled
from tidegate_policy.model import Call, CallId, EngineId
from tidegate_policy.scale import autoscaler, call_load, engine_sets, slo_headroom
from tidegate_sim import hpa, scaled_cell
from tidegate_sim.scaled_cell import EngineKind, Fleet
from tidegate_sim.trace_format import TraceCall

WINDOW_S = 60.0
"""The time over which metrics are averaged, and over which a rate is known."""
SPARE = autoscaler.ScaleSettings().spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a scaler is created for."""

    kinds: Sequence[EngineKind]
    calls: Sequence[TraceCall]
    """The trace, which only the oracle and the static sizes may read."""
    length_s: float
    tpot_s: float | None
    objective: float
    first: Mapping[str, int]
    """The engines at the start."""


Create = Callable[[Task], scaled_cell.Scaler]


class Static:
    """The same engines all the time."""

    period_s = WINDOW_S

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def sample(self, now: float, fleet: Fleet) -> None:
        """Reads nothing."""

    def wanted(self, now: float, fleet: Fleet) -> Mapping[str, int]:
        return self._counts


Metric = Literal["busy", "kv", "backlog"]


class Autoscalers:
    """A HorizontalPodAutoscaler for each kind. `busy`: the share of the time in which the engine computes, which is how GPU
    utilisation is measured. `kv`: `vllm:kv_cache_usage_perc`. Both are means over a minute. `backlog`: the documented
    external metric."""

    period_s = hpa.SYNC_S

    def __init__(self, task: Task, metric: Metric, target: float) -> None:
        self._metric = metric
        self._target = target
        self._hpas = {kind.name: hpa.Hpa(low=kind.low, high=kind.high) for kind in task.kinds}
        self._samples: dict[EngineId, list[tuple[float, float]]] = {}
        """By engine: (instant, value). The value of `busy` is a counter."""

    def sample(self, now: float, fleet: Fleet) -> None:
        samples: dict[EngineId, list[tuple[float, float]]] = {}
        for readings in fleet.ready.values():
            for each in readings:
                value = each.busy_s if self._metric == "busy" else each.load.kv_usage
                kept = [one for one in self._samples.get(each.engine, []) if one[0] >= now - WINDOW_S - 1e-6]
                samples[each.engine] = [*kept, (now, value)]
        self._samples = samples

    def wanted(self, now: float, fleet: Fleet) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name, controller in self._hpas.items():
            if self._metric == "backlog":
                share = len(fleet.ready[name]) / max(sum(map(len, fleet.ready.values())), 1)
                found[name] = controller.by_total(now, fleet.backlog_s * share, fleet.engines(name), self._target)
                continue
            values = [value for each in fleet.ready[name] if (value := self._value(each.engine)) is not None]
            missing = fleet.engines(name) - len(values)
            found[name] = controller.by_pods(now, values, missing, self._target)
        return found

    def _value(self, engine: EngineId) -> float | None:
        samples = self._samples[engine]
        if self._metric == "kv":
            return sum(value for _, value in samples) / len(samples)
        (first_s, first), (last_s, last) = samples[0], samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class Tidegate:
    """The product's autoscaler: `tidegate_policy.scale.autoscaler`, as the operator drives it."""

    period_s = 10.0

    def __init__(
        self, task: Task, settings: autoscaler.ScaleSettings | None = None, *, believed: float = 1.0, learn: bool = True
    ) -> None:
        """`believed`: the autoscaler takes engines for so many times as fast as they are. Without `learn` it is not told of
        the targets that were met."""
        self.reasons: list[tuple[float, str]] = []
        self._settings = settings or autoscaler.ScaleSettings()
        self._task = task
        self._learn = learn
        self._costs = {kind.name: scaled(kind.cost, 1 / believed) for kind in task.kinds}
        self._state = autoscaler.begin(0.0, task.first)
        self._before: Fleet | None = None
        self._before_s = 0.0

    def sample(self, now: float, fleet: Fleet) -> None:
        """Reads nothing between two decisions."""

    def wanted(self, now: float, fleet: Fleet) -> Mapping[str, int]:
        before = self._before
        if before is None:
            self._before = fleet
            return self._state.wanted
        met, missed = fleet.met - before.met, fleet.missed - before.missed
        targets = slo_headroom.Targets(objective=self._task.objective, with_target=met + missed, missed=missed)
        seen = autoscaler.Observation(
            seconds=now - self._before_s,
            arrived=fleet.offered + before.offered.times(-1),
            waiting=fleet.waiting,
            queued=sum(each.load.waiting for readings in fleet.ready.values() for each in readings),
            running=fleet.running,
            targets={"": targets} if self._learn else {},
            tpot_s=self._task.tpot_s,
            node_pools=[
                autoscaler.NodePool(
                    name=kind.name,
                    cost=self._costs[kind.name],
                    price=kind.price,
                    low=kind.low,
                    high=kind.high,
                    ready=len(fleet.ready[kind.name]),
                    start_s=kind.start_s,
                )
                for kind in self._task.kinds
            ],
        )
        self._before, self._before_s = fleet, now
        self._state, decision = autoscaler.step(now, self._state, seen, self._settings)
        if decision.changed:
            self.reasons.append((now, decision.reason))
        return decision.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The engines that a trace needs, minute by minute, from its true lengths."""

    task: Task
    loads: Sequence[call_load.CallLoad] = field(default_factory=tuple)
    """The rate in each slice of `SLICE_S` seconds."""

    SLICE_S = 15.0

    @staticmethod
    def of(task: Task) -> "Need":
        tallies = [call_load.Tally() for _ in range(math.ceil(task.length_s / Need.SLICE_S))]
        for call in task.calls:
            tallies[min(int(call.arrival_s / Need.SLICE_S), len(tallies) - 1)].add(
                Call(
                    id=CallId(call.id),
                    arrived_at_s=call.arrival_s,
                    prompt_tokens=call.prompt_tokens,
                    output_predicted=call.output_tokens,
                )
            )
        return Need(task=task, loads=[each.load.times(1 / Need.SLICE_S) for each in tallies])

    def engines(self, rate: call_load.CallLoad) -> dict[str, int]:
        """The cheapest set of engines for a rate, with the spare places of the product's autoscaler."""
        kinds = []
        for kind in self.task.kinds:
            alone = call_load.engine_seconds(rate, kind.cost, tpot_s=self.task.tpot_s)
            needed = (
                alone + SPARE * math.sqrt(alone / call_load.places(rate, kind.cost)) if alone < math.inf else math.inf
            )
            kinds.append(
                engine_sets.Kind(
                    name=kind.name,
                    price=kind.price,
                    share=1 / max(needed, 1e-6),
                    low=kind.low,
                    high=kind.high,
                )
            )
        return engine_sets.cheapest(kinds, 1.0 if rate.calls else 0.0)

    def mean(self) -> dict[str, int]:
        """For the mean rate of the whole trace."""
        return self.engines(_mean(self.loads))

    def peak(self) -> dict[str, int]:
        """For the minute with the most work."""
        return max(self.by_minute(), key=lambda counts: sum(counts.values()))

    def by_minute(self) -> list[dict[str, int]]:
        """For the minute around each slice."""
        half = round(WINDOW_S / Need.SLICE_S / 2)
        return [
            self.engines(_mean(self.loads[max(index - half, 0) : index + half])) for index in range(len(self.loads))
        ]


class Oracle:
    """Knows the future load, and has the engines that each minute needs ready in time."""

    period_s = Need.SLICE_S

    def __init__(self, task: Task) -> None:
        self._task = task
        self._needed = Need.of(task).by_minute()

    def sample(self, now: float, fleet: Fleet) -> None:
        """Reads nothing."""

    def wanted(self, now: float, fleet: Fleet) -> Mapping[str, int]:
        index = int(now / Need.SLICE_S)
        found: dict[str, int] = {}
        for kind in self._task.kinds:
            ahead = math.ceil(kind.start_s / Need.SLICE_S) + 1
            found[kind.name] = max((each[kind.name] for each in self._needed[index : index + ahead + 1]), default=0)
        return found


def _mean(loads: Sequence[call_load.CallLoad]) -> call_load.CallLoad:
    total = call_load.NOTHING
    for each in loads:
        total += each
    return total.times(1 / max(len(loads), 1))
