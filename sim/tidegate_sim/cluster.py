"""A pool of unequal engines behind the gateway's dispatcher, in virtual time.

The dispatcher is `tidegate_policy.dispatcher`, the one that the gateway runs; the engines are `engine.VirtualEngine`. What
the gateway's shell does is done here: a call becomes ready when those before it have finished, gets a predicted length and
its share of the workflow's deadline (HexGen eq 5), is sent where the dispatcher says, and its tokens are reported back.
"""

import functools
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_policy import budget, policies
from tidegate_policy.admit import outliers, retries
from tidegate_policy.cost import CostModel, mean_call_seconds
from tidegate_policy.dispatch import dispatcher, engine_table, routing
from tidegate_policy.model import NO_BACKLOG, Call, CallId, EngineId, WorkflowId
from tidegate_sim import engine, loop
from tidegate_sim.history import History
from tidegate_sim.traces import TraceCall

PROGRESS_TOKENS = 16
"""The gateway tells its dispatcher of a stream's progress every so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a pool is scheduled: one row of a table."""

    dispatch: routing.DispatchSettings
    policy: str
    """Order of waiting, in the engines and in the gateway."""
    cap: float | None = None
    """Calls out at an engine at most, as a multiple of the batch that doubles its step time; None = bind on arrival."""
    deadline_s: float = 300.0
    """What every workflow is promised, unless the trace says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a trace."""

    latencies_s: tuple[float, ...]
    """Of each workflow (of each call without one), in order of completion."""
    finished_s: tuple[float, ...]
    """The instants of these completions."""
    queued_share: float
    """Share of the calls that waited in an engine's queue for at least a step."""
    preemptions: int
    steps: int
    busy_share: Mapping[str, float]
    """Share of the makespan in which an engine ran."""
    calls_on: Mapping[str, int]


class Cluster:
    """One run. `run` may be called once."""

    def __init__(self, pool: Mapping[EngineId, CostModel], setting: Setting, history: History, *, seed: int) -> None:
        self._loop = loop.Loop()
        self._setting = setting
        self._history = history
        self._models = list(pool.values())
        table = engine_table.EngineTable(None, outliers.OutlierSettings())
        for name, model in pool.items():
            table.update(engine_table.EngineFacts(id=name, cost=model), lambda: NO_BACKLOG)
        self._dispatcher = dispatcher.Dispatcher(
            table,
            policy=policies.named(setting.policy),
            settings=setting.dispatch,
            limits=dispatcher.Limits(max_waiting=10**9, ttl_s=float("inf")),
            retry=retries.RetrySettings(),
            rng=random.Random(seed),
        )
        self._engines = {
            name: engine.VirtualEngine(self._loop, model, policy=setting.policy, listener=self)
            for name, model in pool.items()
        }
        self._calls: dict[str, TraceCall] = {}
        self._followers: dict[str, list[TraceCall]] = defaultdict(list)
        self._missing: dict[str, int] = {}
        self._open: dict[str, int] = defaultdict(int)
        """Unfinished calls of each workflow."""
        self._arrived_s: dict[str, float] = {}
        self._deadline_s: dict[str, float] = {}
        self._done: list[tuple[float, float]] = []
        self._calls_on: dict[str, int] = dict.fromkeys(pool, 0)

    def run(self, calls: Sequence[TraceCall]) -> Outcome:
        """Runs the trace to its end."""
        for call in calls:
            self._calls[call.id] = call
            self._missing[call.id] = len(call.after)
            self._open[_group(call)] += 1
            if call.deadline_s is not None:
                self._deadline_s.setdefault(_group(call), call.deadline_s)
            for before in call.after:
                self._followers[before].append(call)
            if not call.after:
                self._loop.after(call.arrival_s, functools.partial(self._ready, call))
        self._loop.run()
        if stuck := [group for group, count in self._open.items() if count]:
            raise AssertionError(f"{len(stuck)} workflows never ended, {stuck[0]} among them")
        makespan_s = max(self._loop.now(), 1e-9)
        return Outcome(
            latencies_s=tuple(latency for _, latency in self._done),
            finished_s=tuple(instant for instant, _ in self._done),
            queued_share=sum(item.queued for item in self._engines.values()) / len(calls),
            preemptions=sum(item.preemptions for item in self._engines.values()),
            steps=sum(item.steps for item in self._engines.values()),
            busy_share={name: item.busy_s / makespan_s for name, item in self._engines.items()},
            calls_on=self._calls_on,
        )

    # `engine.Listener`

    def on_tokens(self, call_id: CallId, produced: int) -> None:
        if produced == 1 or produced % PROGRESS_TOKENS == 0:
            self._dispatcher.on_progress(self._loop.now(), call_id, produced)

    def on_end(self, call_id: CallId) -> None:
        now = self._loop.now()
        call = self._calls[call_id]
        self._carry_out(self._dispatcher.on_end(now, call_id))
        group = _group(call)
        self._open[group] -= 1
        if not self._open[group]:
            self._done.append((now, now - self._arrived_s[group]))
        pause_s = call.tool.duration_s if call.tool is not None else 0.0
        for follower in self._followers[call_id]:
            self._missing[follower.id] -= 1
            if not self._missing[follower.id]:
                self._loop.after(pause_s + follower.arrival_s, functools.partial(self._ready, follower))

    # The machinery.

    def _ready(self, item: TraceCall) -> None:
        now = self._loop.now()
        arrived_s = self._arrived_s.setdefault(_group(item), now)
        deadline_s = arrived_s + self._deadline_s.get(_group(item), self._setting.deadline_s)
        call = Call(
            id=CallId(item.id),
            arrival_s=now,
            prompt_tokens=item.prompt_tokens,
            output_predicted=self._history.output_of(item.stage),
            tenant=item.tenant,
            workflow=WorkflowId(item.workflow) if item.workflow else None,
            stage=item.stage,
            left_s=self._history.tail_of(item.stage),
        )
        own_s = mean_call_seconds(self._models, call)
        due_s = budget.due_s(now, deadline_s, cost_s=own_s, rest_s=call.left_s)
        self._carry_out(self._dispatcher.on_arrival(now, replace(call, due_s=due_s)))

    def _carry_out(self, actions: Iterable[dispatcher.Action]) -> None:
        for action in actions:
            if not isinstance(action, dispatcher.Send):
                raise AssertionError(f"call {action.call.id} was not sent: {action}")
            item = self._calls[action.call.id]
            self._calls_on[action.decision.engine] += 1
            self._engines[action.decision.engine].submit(action.call, item.output_tokens, item.prefix)


def _group(call: TraceCall) -> str:
    return call.workflow or call.id


def _cap(model: CostModel, multiple: float | None) -> int | None:
    if multiple is None:
        return None
    doubling = model.step_s / model.decode_s if model.decode_s else float(model.max_batch)
    return max(round(multiple * min(doubling, model.max_batch)), 1)
