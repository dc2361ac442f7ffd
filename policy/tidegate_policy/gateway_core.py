"""The gateway core: every decision that a gateway takes about a call, from its draft to its end.

Events with their instants go in, actions come out. The core never turns back to ask its driver. The gateway (real sockets)
and virtual time (benchmarks) drive the same object:

    draft            may the call come in, and how many tokens must be booked?      admit.promises, predict.output_length
    stage_grant      which share of its workflow's time does it get?                budget, predict.remaining_work
    promise          which deadline, targets, urgency and weight does it get?       admit.promises
    on_arrival ...   where and when is it sent, is it tried again, is it shed?      dispatch.dispatcher, admit.retries
    on_end           what is learned from it?                                       predict, served_tokens, admit.outliers

Between `draft` and `promise` the driver books the tokens and joins the workflow, which are the only steps that wait for the
store.
"""

import itertools
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_policy import budget, immutable, policies, served_tokens
from tidegate_policy.admit import entitlements, outliers, promises, retries, row_window
from tidegate_policy.dispatch import core_actions, dispatcher, engine_table, traffic_split, waiting_limits
from tidegate_policy.dispatch.core_actions import Action
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.model import Backlog, Call, CallId, DropReason, EngineId, StageState, Workflow, WorkflowId
from tidegate_policy.predict import output_length, remaining_work, tool_times, tool_use, workflow_history
from tidegate_policy.scale import call_load

CHANGED = 1.5
"""A predicted length that has changed by this factor orders a waiting call anew."""
PREDICTED_AGAIN = 4
"""Waiting calls of a kind that are predicted again at each answer of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What an operator of a pool may set. The defaults are the product's defaults, in gateways and in benchmarks."""

    policy: str = policies.DEFAULT
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    max_inflight: engine_table.MaxInflight = "auto"
    limits: waiting_limits.Limits = field(default_factory=waiting_limits.Limits)
    ejection: outliers.OutlierSettings = field(default_factory=outliers.OutlierSettings)
    retry: retries.RetrySettings = field(default_factory=retries.RetrySettings)
    classes: Sequence[entitlements.SloClass] = ()
    default_class: str | None = None
    """The class of calls that name none."""
    tenants: Sequence[entitlements.Tenant] = ()
    anyone: entitlements.Tenant = field(default_factory=entitlements.Tenant)
    """What a tenant without an entry is entitled to."""
    learn_costs: bool = False
    """The cost models of engines follow what streams show. Benchmarks turn it off to compare."""


class UnknownSloClass(ValueError):
    """A call names a class that is not configured; the message lists the configured classes."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A stage of a workflow as the store records it."""

    name: str
    after: tuple[str, ...] = ()
    parallel: int = 0
    """Declared calls at the same time; 0 = undeclared."""
    passes: int = 1
    """How often the stage may run in all."""
    done_calls: int = 0
    over: bool = False
    declared: bool = True
    """False for a stage that its first call added to the workflow."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class WorkflowFacts:
    """A workflow as the store records it, with instants of the driver's clock."""

    id: WorkflowId
    tenant: str
    template: str
    """"" = none. It is one of the tenant: no tenant changes what is predicted of another one's workflows."""
    deadline_at_s: float
    cutoff_at_s: float | None
    """The instant after which answers are worthless: the deadline and its grace; None = never."""
    stages: Sequence[StageFacts]
    is_over: bool = False
    """A call of it repeats one that it had."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What an ended call has shown."""

    ok: bool
    """The engine sent the whole answer."""
    rejected: bool = False
    """The engine found the call wrong, and did no work for it."""
    prompt_tokens: int | None = None
    """Usage as the engine reported it; None = not reported."""
    output_tokens: int | None = None
    """Usage of all sequences; None = not reported."""
    finished_at_s: float | None = None
    """The last token; None = the instant of the event."""
    streamed: bool = True
    tool: str | None = None
    """The name of the tool that the answer invokes; `tool_use.NO_TOOL` = none, None = not known."""


@dataclass(slots=True)
class _Admitted:
    """What was agreed for a call that has not ended."""

    draft: promises.Draft
    kind: output_length.Kind
    call: Call
    grant: promises.StageGrant | None = None
    offered: Call | None = None
    """As it was counted in the offered load."""
    rejected: bool = False
    """The last engine that judged the call found it wrong."""
    engine: EngineId | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that this engine is believed to hold."""
    own_s: float | None = None
    """Seconds that the call takes alone, once it has ended well."""
    demand_s: float = 0.0
    """Seconds of the whole pool that it took."""
    gap: tool_times.Gap | None = None
    """The time since the conversation's last call."""
    context_tokens: int = 0
    """Of its prompt and its answer, once it has ended well."""
    ended_at_s: float = 0.0
    tool: str = tool_use.NO_TOOL
    """The tool that its answer invokes."""


class GatewayCore:
    """Not thread-safe. One object for each gateway, or for each cell of a benchmark."""

    def __init__(self, settings: CoreSettings, rng: random.Random) -> None:
        self.lengths = output_length.OutputLengths()
        self.tools = tool_use.ToolUse()
        self.remaining_work = remaining_work.RemainingWork()
        self.tenant_service = served_tokens.TenantService()
        self.engines = engine_table.EngineTable(
            settings.max_inflight, settings.ejection, learn_costs=settings.learn_costs
        )
        self.dispatcher = dispatcher.Dispatcher(
            self.engines,
            policy=policies.create(settings.policy),
            settings=settings.dispatch,
            limits=settings.limits,
            retry=settings.retry,
            rng=rng,
        )
        self.rows = row_window.RowWindow()
        self.workflows = workflow_history.WorkflowHistory(self.remaining_work, self.dispatcher.gate.observe)
        self.set_classes(settings.classes, settings.default_class, settings.tenants)
        self._anyone = settings.anyone
        self._crowded = max(settings.limits.max_waiting // 2, 1)
        self._admitted: dict[CallId, _Admitted] = {}
        self._waiting: dict[output_length.Kind, dict[CallId, None]] = {}
        """The waiting calls of each kind that have the predictions of this core, in the order in which they are predicted
        again."""
        self.offered = call_load.Tally()
        """The calls that have arrived, with their predicted lengths, whether engines exist or not, but for those that
        engines rejected: they are no work for more engines."""

    def set_classes(
        self,
        classes: Iterable[entitlements.SloClass],
        default_class: str | None,
        tenants: Iterable[entitlements.Tenant],
    ) -> None:
        """Replaces the classes and the tenants; admitted calls keep their promises."""
        self._classes = {item.name: item for item in classes}
        self._default_class = default_class or ""
        self._tenants = {item.name: item for item in tenants}
        self.dispatcher.tenants.on_settings(several=len(self._tenants) > 1)

    # Admission.

    def draft(self, now: float, facts: promises.CallFacts) -> promises.Draft | DropReason:
        """The call that may come in, or the reason for which it is shed. Raises `UnknownSloClass`."""
        if facts.slo_class is not None and self._classes and facts.slo_class not in self._classes:
            known = ", ".join(sorted(self._classes))
            raise UnknownSloClass(f"class {facts.slo_class!r} is unknown; known are {known}")
        name = facts.slo_class or self._default_class
        slo_class = self._classes.get(name) or entitlements.SloClass(name=name)
        if slo_class.sheddable and (self._is_crowded(facts.tenant) or self._must_wait(now, facts)):
            return DropReason.SATURATED
        prompt_tokens = facts.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = self.lengths.prompt_tokens(
                facts.tenant, facts.model, facts.characters, facts.messages, facts.media
            )
            if facts.most_prompt_tokens is not None:
                prompt_tokens = min(prompt_tokens, facts.most_prompt_tokens)
        kind = promises.own_kind(facts, slo_class.name)
        each = self.lengths.predict(kind, facts.max_tokens, prompt_tokens).expected
        return promises.Draft(
            facts=facts,
            arrival_at_s=now,
            slo_class=slo_class,
            tenant=self._tenants.get(facts.tenant) or self._anyone,
            prompt_tokens=prompt_tokens,
            tokens_to_book=prompt_tokens + each * facts.sequences,
        )

    def has_target(self, facts: promises.CallFacts) -> bool:
        """Whether anything is promised for such a call: by its class, its own claims, or its workflow."""
        slo_class = self._classes.get(facts.slo_class or self._default_class)
        promised = () if slo_class is None else (slo_class.ttft_s, slo_class.tpot_s, slo_class.deadline_s)
        claims = facts.claims
        claimed = (claims.ttft_s, claims.tpot_s, claims.deadline_s)
        return facts.workflow is not None or any(target is not None for target in (*promised, *claimed))

    def stage_grant(self, now: float, workflow: WorkflowFacts, stage: str, model: str) -> promises.StageGrant:
        """The share of the workflow's time that a call of `stage` gets, ready at `now` (HexGen eq 5)."""
        models = self.engines.costs()
        declared = {item.name for item in workflow.stages if item.declared}
        states = tuple(
            StageState(
                name=item.name,
                after=item.after,
                mean_s=0.0
                if item.name != stage and self.workflows.has_no_calls(workflow.tenant, workflow.template, item.name)
                else self.lengths.stage_seconds((workflow.tenant, workflow.template, item.name, model), models),
                passes=max(1, item.passes - item.done_calls // max(item.parallel, 1)),
                done=item.over,
            )
            for item in workflow.stages
        )
        flow = Workflow(id=workflow.id, deadline_at_s=workflow.deadline_at_s, stages=states)
        granted = budget.of_call(now, flow, stage)
        key = (workflow.tenant, workflow.template, stage)
        learned_s = None if stage in declared else self.remaining_work.predict(key)
        if learned_s is not None:
            own_s = self.lengths.stage_seconds((*key, model), models)
            due_at_s = budget.due_at_s(now, workflow.deadline_at_s, cost_s=own_s, rest_s=learned_s)
            granted = budget.Budget(due_at_s=due_at_s, rest_s=learned_s)
        return promises.StageGrant(
            workflow=workflow.id,
            stage=stage,
            tenant=workflow.tenant,
            template=workflow.template,
            due_at_s=granted.due_at_s,
            deadline_at_s=workflow.cutoff_at_s,
            rest_s=granted.rest_s,
            is_over=workflow.is_over,
        )

    def _is_crowded(self, tenant: str) -> bool:
        """Half of the queue is full, and the tenant has its part of that."""
        counts = self.dispatcher.waiting_by_tenant
        own, most = counts.get(tenant, 0), self._crowded
        return self.dispatcher.waiting >= most and own >= most / (len(counts) if own else len(counts) + 1)

    def promise(self, draft: promises.Draft, grant: promises.StageGrant | None) -> Call:
        """The call with all that it is promised, for `on_arrival`, or for `on_cancel` when it is withdrawn."""
        draft, kind = promises.entitled(draft, grant, self._tenants, self._anyone), draft.kind(grant)
        length = self.lengths.predict(kind, draft.facts.max_tokens, draft.prompt_tokens)
        facts, gap, tool = draft.facts, None, tool_use.NOT_KNOWN
        if facts.conversation is not None:
            gap = self.tools.on_arrival(draft.arrival_at_s, facts.tenant, facts.conversation)
            if facts.offers_tools:
                tool = self.tools.predict(kind, facts.tenant, tool_use.NO_TOOL if gap is None else gap.tool)
        call = promises.promise(draft, grant, length, tool, self.engines.live_kinds())
        self._admitted[call.id] = _Admitted(draft, kind, call, grant, gap=gap)
        if grant is not None and not grant.is_over:
            self.workflows.on_call(
                draft.arrival_at_s, grant.workflow, call.id, grant.stage, tenant=grant.tenant, template=grant.template
            )
        return call

    # Events of a call.

    def on_arrival(self, now: float, call: Call, only: Container[EngineId] | None = None) -> list[Action]:
        """The call came in; it may go to the engines of `only`, to all if that is None."""
        self.offered.add(call)
        admitted = self._admitted.get(call.id)
        if admitted is not None:
            admitted.offered = call
        actions = self._seen(now, self.dispatcher.on_arrival(now, call, only))
        admitted = self._admitted.get(call.id)
        if admitted is not None and admitted.engine is None and admitted.call is call:
            self._waiting.setdefault(admitted.kind, {})[call.id] = None
        return actions

    def next_row(self, now: float, limits: row_window.RowLimits) -> str | None:
        """The relQuery whose next row may start now; None = no row may."""
        accepting = self.engines.accepting(now)
        room = any(item.limit is None or item.routable.calls < row_window.places(item.limit) for item in accepting)
        return self.rows.next(limits, waiting=self.dispatcher.waiting, engines=len(accepting), room=room)

    def on_first_token(self, now: float, call_id: CallId) -> list[Action]:
        """The engine answers the call."""
        admitted = self._admitted.get(call_id)
        if admitted is not None:
            admitted.rejected = False
        return self._seen(now, self.dispatcher.on_first_token(now, call_id))

    def on_progress(self, now: float, call_id: CallId, tokens: int) -> None:
        """`tokens` tokens of the call, of all its sequences, have come out so far."""
        self.dispatcher.on_progress(now, call_id, tokens)

    def on_attempt_failed(self, now: float, call_id: CallId, failure: retries.Failure) -> list[Action]:
        """An engine failed the call before its first token."""
        admitted = self._admitted.get(call_id)
        if admitted is not None and failure is retries.Failure.REJECTED:
            admitted.rejected = True
        return self._seen(now, self.dispatcher.on_attempt_failed(now, call_id, failure))

    def on_engine_result(
        self, now: float, engine: EngineId, tenant: str, *, ok: bool, lost: bool = False
    ) -> engine_table.Result:
        """As `EngineTable.on_attempt`."""
        return self.engines.on_attempt(now, engine, tenant, ok=ok, lost=lost)

    def on_end(self, now: float, call_id: CallId, result: CallResult) -> list[Action]:
        """The call ended by itself, well or not. The core learns from an answer that is whole."""
        admitted = self._admitted.get(call_id)
        if admitted is not None:
            admitted.rejected = result.rejected
            self._learn(now, admitted, result)
            self._forget(now, call_id)
        return self._seen(now, self.dispatcher.on_end(now, call_id, ok=result.ok))

    def on_cancel(self, now: float, call_id: CallId) -> list[Action]:
        """The client went away, or the call was withdrawn before it arrived. An id that is not here is ignored."""
        self._forget(now, call_id)
        return self._seen(now, self.dispatcher.on_cancel(now, call_id))

    def on_workflow_end(
        self, now: float, workflow: WorkflowId, *, ok: bool, uncalled: Sequence[str] = ()
    ) -> list[Action]:
        """The workflow is done, or it was cancelled or has expired. The core learns from one that is done."""
        self.workflows.on_workflow_end(now, workflow, ok=ok, uncalled=uncalled)
        return self._seen(now, self.dispatcher.on_workflow_end(now, workflow))

    # Events of the pool.

    def on_engine(self, now: float, facts: engine_table.EngineFacts) -> list[Action]:
        """An engine appeared, or what is known of it changed."""
        if facts.health is engine_table.Health.DOWN:
            self.dispatcher.on_cache_lost(facts.id)
        self.engines.update(facts, lambda: self.dispatcher.own_backlog(facts.id))
        return self._seen(now, self.dispatcher.pump(now))

    def on_others(self, now: float, others: Mapping[EngineId, Backlog]) -> list[Action]:
        """The work of other gateways on each engine; an engine that is absent has none."""
        self.engines.set_others(others)
        return self._seen(now, self.dispatcher.pump(now))

    def on_cache_lost(self, engine: EngineId) -> None:
        """The engine restarted, or reported that it cleared its prefix cache."""
        self.dispatcher.on_cache_lost(engine)

    def on_engine_gone(self, now: float, engine: EngineId) -> list[Action]:
        """Discovery no longer lists the engine."""
        return self._seen(now, self.dispatcher.on_engine_gone(now, engine))

    def on_policy(self, now: float, name: str, parameters: Mapping[str, float] | None = None) -> int:
        """Orders the waiting calls by another policy; returns their number. Raises `policies.UnknownPolicy`,
        `policies.BadParameter`."""
        return self.dispatcher.on_policy(now, policies.create(name, parameters))

    def on_split(self, split: traffic_split.TrafficSplit | None) -> None:
        """Divides the calls among two revisions of the engines from here on; None = no longer."""
        self.dispatcher.split = split

    def on_tick(self, now: float) -> list[Action]:
        """Sheds the calls whose time in the gateway is over, and sends waiting calls to engines that came back."""
        return self._seen(now, self.dispatcher.on_tick(now))

    def on_drain(self) -> None:
        """From here on new calls are shed; the waiting calls are still served."""
        self.dispatcher.on_drain()

    # The machinery.

    def _must_wait(self, now: float, facts: promises.CallFacts) -> bool:
        return facts.workflow is not None and self.dispatcher.gate.must_wait(
            now, WorkflowId(facts.workflow), facts.tenant
        )

    def _seen(self, now: float, actions: list[Action]) -> list[Action]:
        """Remembers where calls went, and forgets the calls that left."""
        for action in actions:
            if isinstance(action, core_actions.Send):
                admitted = self._admitted.get(action.call.id)
                if admitted is not None:
                    if admitted.engine is None:
                        self._waits_no_more(admitted)
                    admitted.engine, admitted.cached_tokens = action.decision.engine, action.cached_tokens
            else:
                self._forget(now, action.call.id)
        return actions

    def _forget(self, now: float, call_id: CallId) -> None:
        admitted = self._admitted.pop(call_id, None)
        if admitted is None:
            return
        if admitted.engine is None:
            self._waits_no_more(admitted)
        if admitted.rejected and admitted.offered is not None:
            self.offered.remove(admitted.offered)
        if admitted.call.workflow is not None:
            self.workflows.on_end(now, admitted.call.workflow, call_id, admitted.own_s, admitted.demand_s)
        tenant, conversation = admitted.draft.facts.tenant, admitted.draft.facts.conversation
        if conversation is not None:
            last = self.tools.on_leave(tenant, conversation)
            if last and admitted.context_tokens:
                self.tools.on_away(admitted.ended_at_s, tenant, conversation, admitted.tool, admitted.context_tokens)

    def _learn(self, now: float, admitted: _Admitted, result: CallResult) -> None:
        call, facts = admitted.call, admitted.draft.facts
        if not result.ok or result.prompt_tokens is None or result.output_tokens is None:
            return
        self.tenant_service.observe(now, call.tenant, result.prompt_tokens + result.output_tokens, call.weight)
        seen = output_length.LengthObservation(
            tenant=facts.tenant,
            characters=facts.characters,
            media=facts.media,
            messages=facts.messages,
            sequences=call.sequences,
            prompt_tokens=result.prompt_tokens,
            output_tokens=result.output_tokens,
        )
        self.lengths.observe(admitted.kind, seen)
        if admitted.kind in self._waiting:
            self._predict_again(now, admitted.kind)
        if result.output_tokens:
            each = max(round(result.output_tokens / call.sequences), 1)
            real = Call(
                id=call.id,
                arrived_at_s=call.arrived_at_s,
                prompt_tokens=max(result.prompt_tokens, 1),
                output_predicted=each,
                sequences=call.sequences,
            )
            admitted.own_s, admitted.demand_s = self.engines.measure(real, admitted.cached_tokens)
            self.dispatcher.tenants.observe(admitted.own_s * call.sequences, admitted.demand_s)
            if call.group is not None:
                self.rows.observe(call.group, self.engines.busy_part(real, admitted.cached_tokens))
        ended_at_s = now if result.finished_at_s is None else result.finished_at_s
        if facts.conversation is not None and result.tool is not None:
            self._learn_tool(admitted, result.tool, result.prompt_tokens)
            admitted.context_tokens, admitted.ended_at_s = result.prompt_tokens + result.output_tokens, ended_at_s
        if admitted.engine is not None:
            prompt, output = result.prompt_tokens, result.output_tokens
            self.engines.on_answer(ended_at_s, admitted.engine, call.id, prompt, output, streamed=result.streamed)

    def _waits_no_more(self, admitted: _Admitted) -> None:
        waiting = self._waiting.get(admitted.kind)
        if waiting is not None:
            waiting.pop(admitted.call.id, None)
            if not waiting:
                del self._waiting[admitted.kind]

    def _predict_again(self, now: float, kind: output_length.Kind) -> None:
        """Predicts some waiting calls of a kind again, those first that were predicted least recently. A call whose length
        has changed gets its promises and its place in the queue anew, and keeps its arrival."""
        waiting = self._waiting[kind]
        for call_id in list(itertools.islice(waiting, PREDICTED_AGAIN)):
            del waiting[call_id]
            waiting[call_id] = None
            admitted = self._admitted[call_id]
            draft, call = admitted.draft, admitted.call
            length = self.lengths.predict(kind, draft.facts.max_tokens, draft.prompt_tokens)
            if max(length.expected, call.output_predicted) < CHANGED * min(length.expected, call.output_predicted):
                continue
            tool = tool_use.NextTool(tool=call.tool, tool_s=call.tool_s, return_tokens=call.tool_return_tokens)
            admitted.call = promises.promise(draft, admitted.grant, length, tool, self.engines.live_kinds())
            self.dispatcher.on_prediction(now, admitted.call)

    def _learn_tool(self, admitted: _Admitted, tool: str, prompt_tokens: int) -> None:
        facts, gap = admitted.draft.facts, admitted.gap
        admitted.tool = tool
        if facts.offers_tools:
            self.tools.on_answer(admitted.kind, tool_use.NO_TOOL if gap is None else gap.tool, tool)
        if gap is not None:
            self.tools.observe(facts.tenant, gap, prompt_tokens)


def used_tokens(call: Call, result: CallResult, *, otherwise: int) -> int:
    """Tokens to charge to the tenant for a call: what its engine reported, else `otherwise`."""
    if result.output_tokens is None:
        return otherwise
    return (call.prompt_tokens if result.prompt_tokens is None else result.prompt_tokens) + result.output_tokens
