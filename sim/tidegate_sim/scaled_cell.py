"""A cell of a benchmark whose engines come and go: a trace behind the gateway core, and a scaler that sets the engines.

A new engine serves after its start time, in which the model is loaded. An engine that goes gets no further calls and ends
when it has finished those that it has, as the operator drains pods. Both are paid for from the request of the engine to its
end. The scaler is told what a real one could read, and the pool never has more or fewer engines than its bounds.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch import engine_table
from tidegate_policy.model import CallId, EngineId
from tidegate_policy.scale import call_load
from tidegate_sim import cell, engine_limits, history
from tidegate_sim.trace_format import TraceCall

SAMPLE_S = 5.0
"""Time between two readings of the engines' metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The engines of one node pool."""

    name: str
    cost: CostModel
    gpus: int
    gpu_price: float
    """Of a GPU for an hour; relative."""
    start_s: float
    """Seconds from the request of an engine until it serves."""
    low: int = 0
    high: int = 12

    @property
    def price(self) -> float:
        """Of an engine for an hour."""
        return self.gpus * self.gpu_price


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One engine at one instant."""

    engine: EngineId
    load: engine_limits.EngineLoad
    busy_s: float
    """Seconds in which the engine has computed since its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What a scaler may read."""

    ready: Mapping[str, Sequence[Reading]]
    """By kind: the engines that serve."""
    starting: Mapping[str, int]
    running: int
    """Calls at engines, those that drain included."""
    offered: call_load.CallLoad
    """The calls that have arrived since the start, with their predicted lengths."""
    waiting: call_load.CallLoad
    """The calls that wait in the gateway."""
    backlog_s: float
    """The sum over the engines of the predicted seconds until they have done what was sent to them: the gateway's metric
    `tidegate_engine_backlog_seconds`."""
    met: int
    missed: int
    """Calls that have ended since the start, by whether they met their targets."""

    def engines(self, kind: str) -> int:
        """Engines that serve or start."""
        return len(self.ready[kind]) + self.starting[kind]


class Scaler(Protocol):
    """Sets the number of engines of each kind. One object for each cell."""

    period_s: float
    """Time between two decisions; a multiple of `SAMPLE_S`."""

    def sample(self, now: float, fleet: Fleet) -> None:
        """Every `SAMPLE_S`."""

    def wanted(self, now: float, fleet: Fleet) -> Mapping[str, int]:
        """Every `period_s`: the engines of each kind."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One engine from its request to its end. Instants are virtual seconds since the start of the trace."""

    kind: EngineKind
    requested_at_s: float
    ready: bool = False
    leaving: bool = False
    ended_at_s: float | None = None

    def seconds(self, until_s: float) -> float:
        """The seconds that are paid for until `until_s`."""
        end_s = until_s if self.ended_at_s is None else min(self.ended_at_s, until_s)
        return end_s - self.requested_at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What the engines of a run cost until the end of the trace."""

    gpu_hours: float
    cost: float
    """GPU hours times the prices of the kinds."""
    engines: float
    """Mean number of engines."""
    most_engines: int
    starts: int
    changes: Sequence[float] = field(default_factory=tuple)
    """The instants at which the wanted number of a kind changed."""


class ScaledCell(cell.Cell):
    """One run. `run` may be called once."""

    def __init__(
        self,
        kinds: Sequence[EngineKind],
        first: Mapping[str, int],
        scaler: Scaler,
        row: cell.Row,
        learned_from: Sequence[TraceCall],
        *,
        seed: int,
        length_s: float,
    ) -> None:
        """`first` engines of each kind serve at the start. The scaler works for `length_s` seconds."""
        super().__init__({}, replace(row, learn=False), (), seed=seed)
        history.learn(self.core, learned_from, [kind.cost for kind in kinds], model=cell.MODEL)
        self._kinds = {kind.name: kind for kind in kinds}
        self._scaler = scaler
        self._length_s = length_s
        self._lives: dict[EngineId, Life] = {}
        self._number = 0
        self._met = self._missed = 0
        self._changes: list[float] = []
        self._most = 0
        self._wanted = {kind.name: first.get(kind.name, 0) for kind in kinds}
        for kind in kinds:
            for _ in range(self._wanted[kind.name]):
                self._serve(self._requested(kind))

    def run(self, calls: Sequence[TraceCall]) -> cell.Outcome:
        self._loop.after(0.0, self._tick)
        return super().run(calls)

    def bill(self) -> Bill:
        """After the run."""
        hours = {name: life.seconds(self._length_s) / 3600 for name, life in self._lives.items()}
        return Bill(
            gpu_hours=sum(hours[name] * life.kind.gpus for name, life in self._lives.items()),
            cost=sum(hours[name] * life.kind.price for name, life in self._lives.items()),
            engines=sum(hours.values()) * 3600 / self._length_s,
            most_engines=self._most,
            starts=sum(life.requested_at_s > 0 for life in self._lives.values()),
            changes=tuple(self._changes),
        )

    def on_end(self, call_id: CallId) -> None:
        name = EngineId(self._open[call_id].engine)
        super().on_end(call_id)
        item, outcome = self._trace[call_id], self._ended[call_id]
        if meets_targets(item, outcome):
            self._met += 1
        else:
            self._missed += 1
        if self._lives[name].leaving:
            self._end_if_idle(name)

    def _tick(self) -> None:
        now, fleet = self._loop.now(), self._fleet()
        self._scaler.sample(now, fleet)
        if round(now / SAMPLE_S) % round(self._scaler.period_s / SAMPLE_S) == 0:
            self._set(now, self._scaler.wanted(now, fleet))
        self._most = max(self._most, sum(life.ended_at_s is None for life in self._lives.values()))
        if now + SAMPLE_S < self._length_s:
            self._loop.after(SAMPLE_S, self._tick)

    def _fleet(self) -> Fleet:
        ready: dict[str, list[Reading]] = {name: [] for name in self._kinds}
        starting = dict.fromkeys(self._kinds, 0)
        for name, life in self._lives.items():
            if life.ended_at_s is not None or life.leaving:
                continue
            if life.ready:
                engine = self._engines[name]
                ready[life.kind.name].append(Reading(engine=name, load=engine.load(), busy_s=engine.busy_s))
            else:
                starting[life.kind.name] += 1
        return Fleet(
            ready=ready,
            starting=starting,
            running=self.core.dispatcher.inflight,
            offered=self.core.offered.load,
            waiting=call_load.of_calls(self.core.dispatcher.waiting_calls()),
            backlog_s=sum(engine.cost.backlog_seconds(engine.backlog) for engine in self.core.engines),
            met=self._met,
            missed=self._missed,
        )

    def _set(self, now: float, wanted: Mapping[str, int]) -> None:
        """Requests engines and lets engines go."""
        bounded = {name: min(max(wanted[name], kind.low), kind.high) for name, kind in self._kinds.items()}
        if bounded != self._wanted:
            self._changes.append(now)
            self._wanted = bounded
        for name, kind in self._kinds.items():
            present = [
                each
                for each, life in self._lives.items()
                if life.kind is kind and life.ended_at_s is None and not life.leaving
            ]
            for _ in range(bounded[name] - len(present)):
                engine = self._requested(kind)
                self._loop.after(kind.start_s, functools.partial(self._serve, engine))
            # A Deployment deletes pods that are not ready first, and then those that became ready last.
            order = sorted(present, key=lambda each: (self._lives[each].ready, -self._lives[each].requested_at_s))
            for engine in order[: max(len(present) - bounded[name], 0)]:
                self._leave(now, engine)

    def _requested(self, kind: EngineKind) -> EngineId:
        self._number += 1
        name = EngineId(f"{kind.name}-{self._number}")
        self._lives[name] = Life(kind=kind, requested_at_s=self._loop.now())
        return name

    def _serve(self, name: EngineId) -> None:
        """The engine has loaded its model."""
        life = self._lives[name]
        if life.ended_at_s is not None:
            return
        life.ready = True
        self._engines[name] = self._created(life.kind.cost)
        self._calls_on[name] = 0
        self._carry_out(self.core.on_engine(self._loop.now(), engine_table.EngineFacts(id=name, cost=life.kind.cost)))

    def _leave(self, now: float, name: EngineId) -> None:
        life = self._lives[name]
        if not life.ready:
            life.ended_at_s = now
            return
        life.leaving = True
        facts = engine_table.EngineFacts(id=name, cost=life.kind.cost, health=engine_table.Health.DOWN)
        self._carry_out(self.core.on_engine(now, facts))
        self._end_if_idle(name)

    def _end_if_idle(self, name: EngineId) -> None:
        load, life = self._engines[name].load(), self._lives[name]
        if life.ended_at_s is None and not load.running and not load.waiting:
            life.ended_at_s = self._loop.now()
            self._carry_out(self.core.on_engine_gone(self._loop.now(), name))


def meets_targets(item: TraceCall, outcome: cell.CallOutcome) -> bool:
    """Whether a call met its targets (H-MAS eq 8); a call that was shed met none."""
    if outcome.shed is not None or outcome.ttft_s is None or outcome.e2e_s is None:
        return False
    tpot_s = (outcome.e2e_s - outcome.ttft_s) / max(outcome.output_tokens - 1, 1)
    in_time = item.ttft_slo_ms is None or outcome.ttft_s * 1000 <= item.ttft_slo_ms
    return in_time and (item.tpot_slo_ms is None or tpot_s * 1000 <= item.tpot_slo_ms)
