"""One cell of a benchmark: a trace on a pool of unequal engines behind the gateway core, in virtual time. The row, the
outcome and the run are in one file because each field of a row changes one line of the run.

The gateway core is `tidegate_policy.gateway_core`, the object that the gateway runs: it drafts, predicts, grants, promises,
admits, dispatches, retries and learns. The engines run vLLM's scheduler (`virtual_engine`) or its fast model
(`fast_virtual_engine`). This module only does what sockets and the store do for a gateway: it says when a call arrives,
carries out the core's actions, and reports tokens.
"""

import functools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_policy import gateway_core
from tidegate_policy.admit import promises
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch import core_actions, engine_table, prompt_blocks
from tidegate_policy.engine import session_hold
from tidegate_policy.model import CallId, DropReason, EngineId, WorkflowId
from tidegate_policy.predict import text_density, tool_use
from tidegate_policy.steer import steering_loop
from tidegate_sim import beliefs, engine_limits, engine_models, history, perception, virtual_steering, virtual_time
from tidegate_sim.trace_format import TraceCall

PROGRESS_TOKENS = 16
"""Tokens of a stream between two reports of its progress, as in the gateway's relay."""
MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a pool is scheduled: one row of a table."""

    gateway: gateway_core.CoreSettings = field(default_factory=gateway_core.CoreSettings)
    """The gateway's settings; the defaults are the product's."""
    engine_policy: str | None = None
    """The scheduling policy of the engines; None = the gateway's."""
    stock_scheduler: bool = False
    """Engines run vLLM's own scheduler class; `engine_policy` is then its own `fcfs` or `priority`."""
    prefix_cache: bool = True
    max_step_tokens: int | None = None
    """Tokens scheduled in one step at most; None = what the profiles say."""
    model: engine_models.Model = "vllm"
    """Whether vLLM's scheduler runs in the engines, or the fast model of it. The schedules are equal."""
    engine_parameters: Mapping[str, float] = field(default_factory=dict)
    """Parameters of the engines' policy, and of the gateway's where `engine_policy` is None."""
    regulators: Sequence[str] = ()
    """The regulators of the engines' steps."""
    hold: session_hold.Settings | None = None
    """The bounds of the KV that engines hold between the calls of a session; None = they hold nothing."""
    stock_key: engine_limits.StockKey = "latest-start"
    """The number by which vLLM's own `priority` policy orders calls."""
    prefill_first: bool = False
    """Steps that can prefill decode nothing, as in vLLM before chunked prefill. With `stock_scheduler` only."""
    predictors: perception.Perception | None = None
    """What is known of a call before it runs; None = what the gateway predicts and the trace claims."""
    learn: bool = True
    """Whether the gateway has learned from the suite's earlier trace."""
    steering: steering_loop.Settings | None = None
    """The steering loop's settings; None = the policy stays."""
    workflow_deadline_s: float = 300.0
    """The deadline of a workflow for which the trace has none."""
    profiles: beliefs.Beliefs = "exact"
    """The profiles with which the gateway starts. Engines always run with their own."""

    def __post_init__(self) -> None:
        policy = self.engine_policy or self.gateway.policy
        if self.stock_scheduler and policy not in ("fcfs", "priority"):
            raise ValueError(f"vLLM's own scheduler has the policies fcfs and priority, not {policy!r}")
        if self.prefill_first and not self.stock_scheduler:
            raise ValueError("prefill_first goes with stock_scheduler")


@dataclass(slots=True, kw_only=True)
class CallOutcome:
    """What came of one call. Instants are virtual seconds since the start of the trace."""

    id: str
    workflow: str | None
    stage: str | None
    tenant: str
    slo_class: str
    urgency: int | None
    arrived_at_s: float
    engine: str = ""
    started_at_s: float | None = None
    """The start of the first step that computes the call."""
    first_at_s: float | None = None
    finished_at_s: float | None = None
    output_tokens: int = 0
    shed: DropReason | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at_s is None else self.first_at_s - self.arrived_at_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_at_s is None else self.finished_at_s - self.arrived_at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a trace."""

    calls: Sequence[CallOutcome]
    """In order of their ends."""
    latencies_s: tuple[float, ...]
    """Of each workflow, and of each call without one, in order of completion."""
    finished_s: tuple[float, ...]
    """The instants of these completions."""
    queued_share: float
    """Share of the calls that waited in an engine's queue for at least one step."""
    preemptions: int
    steps: int
    busy_share: Mapping[str, float]
    """Share of the makespan in which an engine ran."""
    calls_on: Mapping[str, int]
    switches: Sequence[tuple[float, str, str]] = ()
    """The switches of the steering loop: (instant, policy, reason)."""


class Cell:
    """One run. `run` may be called once."""

    def __init__(
        self,
        pool: Mapping[EngineId, CostModel],
        row: Row,
        learned_from: Sequence[TraceCall],
        *,
        seed: int,
        loop: virtual_time.Loop | None = None,
        create: Callable[..., engine_models.Engine] = engine_models.create,
    ) -> None:
        """`loop` and `create` replace virtual time and the virtual engines, for a run on a real engine."""
        self._loop = loop or virtual_time.Loop()
        self._row = row
        if row.max_step_tokens is not None:
            pool = {name: replace(model, max_step_tokens=row.max_step_tokens) for name, model in pool.items()}
        self.core = gateway_core.GatewayCore(_granting(row.gateway), random.Random(seed))
        if row.engine_parameters and row.engine_policy is None:
            self.core.on_policy(0.0, row.gateway.policy, row.engine_parameters)
        self._create = create
        self._engines = {name: self._created(model) for name, model in pool.items()}
        self._perceived = perception.Perceiver(row.predictors, seed)
        for name, profile in beliefs.of(row.profiles, pool, seed).items():
            self._carry_out(self.core.on_engine(0.0, engine_table.EngineFacts(id=name, cost=profile)))
        self._steering = (
            None
            if row.steering is None
            else virtual_steering.VirtualSteering(
                self.core, self._engines, row.steering, start=row.engine_policy or row.gateway.policy
            )
        )
        history.learn(self.core, learned_from if row.learn else (), list(pool.values()), model=MODEL)
        self._trace: dict[str, TraceCall] = {}
        self._open: dict[str, CallOutcome] = {}
        self._followers: dict[str, list[TraceCall]] = defaultdict(list)
        self._missing: dict[str, int] = {}
        self._unfinished: dict[str, int] = defaultdict(int)
        """Unfinished calls of each workflow."""
        self._arrived_at_s: dict[str, float] = {}
        self._deadline_s: dict[str, float] = {}
        self._done: list[tuple[float, float]] = []
        self._ended: dict[str, CallOutcome] = {}
        self._group_sizes: Counter[str] = Counter()
        self._expiry_at_s = math.inf
        """When the next look at calls that wait too long is due."""
        self._calls_on: dict[str, int] = dict.fromkeys(pool, 0)

    def run(self, calls: Sequence[TraceCall]) -> Outcome:
        """Runs the trace to its end. A call that is shed ends its workflow's later calls too."""
        for call in calls:
            self._trace[call.id] = call
            self._missing[call.id] = len(call.after)
            self._unfinished[_group(call)] += 1
            if call.relquery is not None:
                self._group_sizes[call.relquery] += 1
            if call.deadline_s is not None:
                self._deadline_s.setdefault(_group(call), call.deadline_s)
            for before in call.after:
                self._followers[before].append(call)
            if not call.after:
                self._loop.after(call.arrival_s, functools.partial(self._arrive, call))
        if self._steering is not None:
            self._loop.after(self._steering.period_s, self._steer)
        self._loop.run()
        shed = {_group(self._trace[item.id]) for item in self._ended.values() if item.shed is not None}
        if stuck := [group for group, count in self._unfinished.items() if count and group not in shed]:
            raise AssertionError(f"{len(stuck)} workflows never ended, {stuck[0]} among them")
        makespan_s = max((item.finished_at_s or 0.0 for item in self._ended.values()), default=0.0) or 1e-9
        return Outcome(
            calls=tuple(self._ended.values()),
            latencies_s=tuple(latency for _, latency in self._done),
            finished_s=tuple(instant for instant, _ in self._done),
            queued_share=sum(item.queued for item in self._engines.values()) / len(calls),
            preemptions=sum(item.preemptions for item in self._engines.values()),
            steps=sum(item.steps for item in self._engines.values()),
            busy_share={name: item.busy_s / makespan_s for name, item in self._engines.items()},
            calls_on=self._calls_on,
            switches=() if self._steering is None else tuple(self._steering.switches),
        )

    def _created(self, model: CostModel) -> engine_models.Engine:
        """An engine as the row has it."""
        row = self._row
        policy = row.engine_policy or row.gateway.policy
        engine = self._create(
            row.model,
            self._loop,
            model,
            policy=policy,
            listener=self,
            stock=row.stock_scheduler,
            prefix_cache=row.prefix_cache,
            regulators=row.regulators,
            stock_key=row.stock_key,
            prefill_first=row.prefill_first,
            hold=row.hold,
        )
        if row.engine_parameters:
            engine.set_policy(policy, "the row's", row.engine_parameters)
        return engine

    # What the engines report.

    def on_tokens(self, call_id: CallId, produced: int) -> None:
        now = self._loop.now()
        if produced == 1:
            self._open[call_id].first_at_s = now
            self._carry_out(self.core.on_first_token(now, call_id))
        elif produced % PROGRESS_TOKENS == 0:
            self.core.on_progress(now, call_id, produced)

    def on_end(self, call_id: CallId) -> None:
        now, item, outcome = self._loop.now(), self._trace[call_id], self._open.pop(call_id)
        outcome.finished_at_s, outcome.output_tokens = now, item.output_tokens
        outcome.started_at_s = self._engines[EngineId(outcome.engine)].starts.pop(call_id)
        if outcome.first_at_s is None:
            outcome.first_at_s = now
        self._ended[call_id] = outcome
        result = gateway_core.CallResult(
            ok=True,
            prompt_tokens=item.prompt_tokens,
            output_tokens=item.output_tokens,
            finished_at_s=now,
            tool=tool_use.NO_TOOL if item.tool is None else item.tool.name,
        )
        self._carry_out(self.core.on_end(now, call_id, result))
        group = _group(item)
        self._unfinished[group] -= 1
        if not self._unfinished[group]:
            self._done.append((now, now - self._arrived_at_s[group]))
            if item.workflow is not None:
                self._carry_out(self.core.on_workflow_end(now, WorkflowId(group), ok=True))
        pause_s = item.tool.duration_s if item.tool is not None else 0.0
        for follower in self._followers[call_id]:
            self._missing[follower.id] -= 1
            if not self._missing[follower.id]:
                self._loop.after(pause_s + follower.arrival_s, functools.partial(self._arrive, follower))

    # The machinery.

    def _arrive(self, item: TraceCall) -> None:
        now = self._loop.now()
        self._arrived_at_s.setdefault(_group(item), now)
        self._open[item.id] = _opened(item, now)
        delay_s = self._perceived.delay_s(now)
        if delay_s:
            self._loop.after(delay_s, functools.partial(self._admit, item))
        else:
            self._admit(item)

    def _admit(self, item: TraceCall) -> None:
        now = self._loop.now()
        seen = self._perceived.seen(item)
        draft = self.core.draft(now, _facts(seen, self._group_sizes[item.relquery or ""]))
        if isinstance(draft, DropReason):
            self._shed(item.id, draft)
            return
        call = self.core.promise(draft, self._grant(now, item))
        if seen.output_tokens and self._row.predictors is not None:
            call = replace(call, output_predicted=seen.output_tokens, output_upper=seen.output_tokens)
        self._carry_out(self.core.on_arrival(now, call))

    def _grant(self, now: float, item: TraceCall) -> promises.StageGrant | None:
        """A workflow without a declaration, as clients open one by headers. It never expires: the figures are its
        latency."""
        if item.workflow is None:
            return None
        deadline_s = self._deadline_s.get(item.workflow, self._row.workflow_deadline_s)
        workflow = gateway_core.WorkflowFacts(
            id=WorkflowId(item.workflow),
            tenant=item.tenant,
            template="",
            deadline_at_s=self._arrived_at_s[item.workflow] + deadline_s,
            cutoff_at_s=None,
            stages=(),
        )
        return self.core.stage_grant(now, workflow, item.stage or "main", MODEL)

    def _carry_out(self, actions: Iterable[core_actions.Action]) -> None:
        for action in actions:
            if isinstance(action, core_actions.Send):
                name, item = action.decision.engine, self._trace[action.call.id]
                self._calls_on[name] += 1
                self._open[item.id].engine = name
                self._engines[name].submit(action.call, item.output_tokens, item.prefix, item.output_prefix)
            elif isinstance(action, core_actions.Shed):
                self._shed(action.call.id, action.reason)
            else:
                raise AssertionError(f"call {action.call.id} was given up, but no virtual engine fails")
        expiry_at_s = self.core.dispatcher.next_expiry_at_s()
        if expiry_at_s is not None and expiry_at_s < self._expiry_at_s:
            self._expiry_at_s = expiry_at_s
            self._loop.after(max(expiry_at_s - self._loop.now(), 0.0), self._expire)

    def _steer(self) -> None:
        """One observation of the steering loop; the last one is after the last call."""
        if self._steering is not None:
            self._steering.observe(self._loop.now())
            if len(self._ended) < len(self._trace):
                self._loop.after(self._steering.period_s, self._steer)

    def _expire(self) -> None:
        self._expiry_at_s = math.inf
        self._carry_out(self.core.on_tick(self._loop.now()))

    def _shed(self, call_id: str, reason: DropReason) -> None:
        """Ends a call that the core shed, and all calls that would have come after it."""
        outcomes = [self._open.pop(call_id)]
        while outcomes:
            outcome = outcomes.pop()
            outcome.shed = reason
            self._ended[outcome.id] = outcome
            outcomes += [
                _opened(follower, self._loop.now())
                for follower in self._followers[outcome.id]
                if follower.id not in self._ended
            ]


def _opened(item: TraceCall, now: float) -> CallOutcome:
    """The outcome of a call that arrives at `now`."""
    return CallOutcome(
        id=item.id,
        workflow=item.workflow,
        stage=item.stage,
        tenant=item.tenant,
        slo_class=item.slo_class,
        urgency=item.urgency,
        arrived_at_s=now,
    )


def _facts(item: TraceCall, group_size: int) -> promises.CallFacts:
    """The call as a client would send it: every field of the trace that has a header (docs/traces.md)."""
    return promises.CallFacts(
        id=CallId(item.id),
        model=MODEL,
        tenant=item.tenant,
        slo_class=item.slo_class or None,
        claims=promises.Claims(
            urgency=item.urgency,
            ttft_s=None if item.ttft_slo_ms is None else item.ttft_slo_ms / 1000,
            tpot_s=None if item.tpot_slo_ms is None else item.tpot_slo_ms / 1000,
            deadline_s=None if item.workflow else item.deadline_s,
        ),
        characters=round(item.prompt_tokens * text_density.USUAL),
        session=item.session,
        workflow=item.workflow,
        stage=item.stage,
        group=item.relquery,
        group_size=group_size,
        blocks=prompt_blocks.chain((MODEL,), prompt_blocks.of_parts(item.prefix)) if item.prefix else (),
        block_share=prompt_blocks.TRACE_BLOCK_TOKENS / item.prompt_tokens,
        offers_tools=True,
    )


def _granting(settings: gateway_core.CoreSettings) -> gateway_core.CoreSettings:
    """The settings for a trace: what the trace claims is granted, and the queue holds any number of calls for any time."""
    return replace(
        settings,
        anyone=replace(settings.anyone, max_urgency=0),
        limits=replace(settings.limits, max_waiting=10**9, ttl_s=float("inf")),
    )


def _group(call: TraceCall) -> str:
    return call.workflow or call.id
