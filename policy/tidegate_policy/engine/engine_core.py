"""The state machine of one engine, in one file because all its events and commands change one state.

Events with their instants go in; the plan of the next step comes out. It owns the scheduling policy, the
waiting queues under it, the knowledge of each call from arrival to end, the bounds of the operator, the service counters
and the recorders of quality of service. It owns no clock, lock or thread: the driver serialises all methods (but
`PolicySwitch.learn`). The driver is `tidegate_engine.scheduler` in vLLM and `tidegate_sim.realtime` in the engine double.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tidegate_policy import policies, waiting_queue, window
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import (
    batch,
    bounds,
    call_census,
    guarded_holds,
    guarded_policy,
    marked_calls,
    older_calls,
    output_prior,
    policy_switch,
    session_hold,
    size_bounds,
)
from tidegate_policy.engine.engine_probe import EngineProbe, NoProbe
from tidegate_policy.engine.engine_status import KEPT_REASON, SHOWN_WAITING, Controls, State, Switched, WatchReport
from tidegate_policy.engine.known_call import KnownCall
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.regulators.regulator import Memoryless
from tidegate_policy.engine.snapshot import EngineParts, EngineSnapshot
from tidegate_policy.engine.step import EndedCall, EngineLimits, StepFacts, StepPlan
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import token_counts
from tidegate_policy.predict.step_cost import StepCost, StepWork


class EngineCore:
    """The decisions of one engine."""

    def __init__(
        self,
        now: float,
        *,
        cost: CostModel,
        limits: EngineLimits,
        policy: str,
        parameters: Mapping[str, float] | None = None,
        regulators: Sequence[Regulator] = (),
        hold: session_hold.Settings | None = None,
        queues: int = 1,
        probe: EngineProbe | None = None,
        report: Callable[[str, Exception], object] | None = None,
        served: Callable[[float, KnownCall, bool], object] | None = None,
    ) -> None:
        """`hold` bounds what is held for sessions; None = nothing is held. `report` receives the first exception of each
        hook of a policy or regulator. `served` receives each call that ends, and whether it finished. Raises
        `policies.UnknownPolicy` and `policies.BadParameter`."""
        self.limits = limits
        self.failures = guarded_policy.Failures(report)
        self.step_cost = StepCost(cost)
        """The cost model, as the measured steps refine it."""
        self._served = served
        self._probe = probe or NoProbe()
        self.policy = self._policy(policy, parameters)
        self._batch = batch.Batch()
        self.queues = [
            waiting_queue.WaitingQueue(
                self.policy, rekey=self._rekey, started=self._batch.start, waits=self._batch.leave
            )
            for _ in range(queues)
        ]
        """All under one policy, in the order in which the engine serves them; vLLM has two."""
        self.preemptions = 0
        self.busy_s = 0.0
        """Seconds in which a step ran, since the start."""
        self.prompt_tokens = 0
        """Prompt tokens computed since the start."""
        self.output_tokens = 0
        self.bypass = False
        """Whether the operator's bounds are lifted and only the regulators that protect memory act."""
        self.output_prior = output_prior.OutputPrior()
        self._regulators = regulators
        self._learners = [each for each in regulators if not isinstance(each, Memoryless)]
        """The regulators that see the steps that ended."""
        self._holds = guarded_holds.GuardedHolds(
            now, settings=hold, capacity_tokens=limits.kv_tokens, probe=self._probe, failures=self.failures
        )
        self._switch: policy_switch.PolicySwitch | None = None
        """The switch of the policy that has begun."""
        self._reason = "at start"
        self._since_s = now
        self._calls: dict[CallId, KnownCall] = {}
        self._tokens = token_counts.TokenCounts()
        """The tokens that steps computed for each of them."""
        self._sizes = size_bounds.SizeBounds()
        self._census = call_census.CallCensus()
        self._marked = marked_calls.MarkedCalls()
        self._parts = EngineParts(
            limits=limits,
            queues=self.queues,
            calls=self._calls,
            tokens=self._tokens,
            probe=self._probe,
            census=self._census,
            batch=self._batch,
            sizes=self._sizes,
        )
        self._wanted = Controls()
        """The bounds that the operator asked for, before `bounds` raises them to their floors."""
        self._unbounded = StepPlan(max_running=limits.max_running, max_step_tokens=limits.max_step_tokens)
        """The plan of each step while nothing bounds it."""
        self._watches: list[window.Recorder] = []
        self._preempted: list[CallId] = []
        self._ended: list[EndedCall] = []

    # Facts that the driver reads.

    @property
    def cost(self) -> CostModel:
        """The present estimate of the engine's costs."""
        return self.step_cost.model

    @property
    def waiting(self) -> int:
        return sum(map(len, self.queues))

    @property
    def running(self) -> int:
        return len(self._calls) - self.waiting

    @property
    def holds_contexts(self) -> bool:
        """Whether contexts may be held at all; if not, the driver need not collect their blocks."""
        return self._holds.active

    @property
    def held_kv_tokens(self) -> int:
        """Tokens of the contexts that are held for sessions."""
        return self._holds.tokens

    def item(self, call_id: CallId) -> policies.QueuedRequest:
        """The call and the work that is left of it. Raises `KeyError`."""
        return self._calls[call_id].item

    def service(self, call_id: CallId) -> policies.Computed:
        """The tokens that steps computed for a call since its arrival. Raises `KeyError`."""
        return self._calls[call_id].computed

    # Events.

    def on_arrival(self, now: float, call: Call) -> policies.QueuedRequest:
        """A call entered the engine. The driver pushes the returned request into a queue."""
        item = policies.QueuedRequest(call=call, service_s=self.cost.call_seconds(call))
        known = self._calls[call.id] = KnownCall(item, self._tokens)
        self._sizes.add(known, self._calls.values())
        self._census.add(call)
        if call.owed and self._census.owed_by[call.tenant] == 1:
            older_calls.promote(call.tenant, self._calls, self.queues, self._census)
        self._note(call.id)
        self._holds.on_arrival(now, call)
        for watch in self._watches:
            with self.failures.caught("watch"):
                watch.on_arrival(call, item.service_s)
        self._rekey(self.policy.on_arrival(now, item))
        return item

    def on_update(self, call: Call) -> policies.QueuedRequest:
        """A call that is in the engine has changed: its session has sent more input, or its client's priority is another
        one. Raises `KeyError`."""
        known = self._calls[call.id]
        self._census.remove(known.item.call)
        self._census.add(call)
        known.item = policies.QueuedRequest(call=call, service_s=self.cost.call_seconds(call))
        self._sizes.add(known, self._calls.values())
        self._batch.change(call.id)
        self._note(call.id)
        for queue in self.queues:
            if call.id in queue:
                queue.update(known.item)
        return known.item

    def on_preemption(self, now: float, call_id: CallId, *, output_tokens: int) -> policies.QueuedRequest:
        """A running call lost its KV blocks. The driver pushes the returned request before its equals.

        The call must compute again what the prefix cache no longer holds of its prompt and its `output_tokens`, before it
        decodes the rest (Semantic Alg 4)."""
        known = self._calls[call_id]
        call = known.item.call
        uncached = max(call.prompt_tokens + output_tokens - self._probe.cached_tokens(call_id), 1)
        service_s = self.cost.remaining_seconds(call, output_tokens=output_tokens, uncached_tokens=uncached)
        known.item = policies.QueuedRequest(call=call, service_s=service_s)
        known.preempted_at_output = known.output_tokens
        self._sizes.add(known, self._calls.values())
        self._batch.leave(call_id)
        self._note(call_id)
        self.preemptions += 1
        if self._learners:
            self._preempted.append(call_id)
        for watch in self._watches:
            with self.failures.caught("watch"):
                watch.on_preemption()
        self._rekey(self.policy.on_preemption(now, known.item))
        return known.item

    def on_found_running(self, call_id: CallId) -> None:
        """A known call runs that may never have stood in a queue, because the engine was given it in another way."""
        if call_id not in self._batch.running:
            self._batch.start(call_id)

    def on_end(self, now: float, call_id: CallId, *, finished: bool) -> None:
        """A call left the engine: finished, or aborted or failed. Ids that are not known are ignored."""
        known = self._calls.pop(call_id, None)
        if known is None:
            return
        self._batch.leave(call_id)
        self._note(call_id)
        if self._served is not None:
            with self.failures.caught("served"):
                self._served(now, known, finished)
        if finished:
            self.output_prior.observe(known.output_tokens)
        self._census.remove(known.item.call)
        if self._learners:
            self._ended.append(EndedCall(call=known.item.call, output_tokens=known.output_tokens, finished=finished))
        self._holds.on_used([call_id])
        for watch in self._watches:
            with self.failures.caught("watch"):
                watch.on_end(now, call_id, tokens=known.output_tokens, finished=finished)
        self._tokens.forget(call_id)
        self._rekey(self.policy.on_end(now, call_id))

    def on_step(
        self,
        now: float,
        *,
        step_s: float,
        computed: Mapping[CallId, policies.Computed],
        ended: Mapping[CallId, bool],
        work: StepWork | None = None,
    ) -> None:
        """A step ended. `ended` maps each call that ended in it to whether it finished. With `work`, what the step
        computed, its time refines the cost model."""
        self.busy_s += step_s
        if work is not None:
            with self.failures.caught("cost"):
                self.step_cost.observe(work, step_s)
        computed, allocated = self._counted(now, computed)
        if self.policy.keys_change:
            self._rekey(self.policy.on_tokens(now, computed))
        self._holds.on_step(now, computed, allocated=allocated)
        for call_id, finished in ended.items():
            self.on_end(now, call_id, finished=finished)
        if self._learners:
            facts = StepFacts(
                now=now,
                step_s=step_s,
                computed=computed,
                preempted=tuple(self._preempted),
                ended=tuple(self._ended),
            )
            self._preempted.clear()
            self._ended.clear()
            for regulator in self._learners:
                guarded_policy.observed(regulator, facts, self.failures)

    def take_plan(self, now: float) -> StepPlan:
        """The plan of the step that the driver starts now."""
        self._rekey(self.policy.begin_step())
        outer = plan = self._bounded()
        regulators = (*self._marked.rules(self._census, bypass=self.bypass), *self._regulators)
        if not regulators:
            return plan
        engine = self.snapshot(now)
        for regulator in regulators:
            if regulator.SAFETY or not self.bypass:
                plan = guarded_policy.shaped(regulator, engine, plan, self.failures)
        if plan is self._unbounded:
            return plan  # it is within all bounds
        plan = plan.at_most(running=outer.max_running, step_tokens=outer.max_step_tokens)
        return bounds.safe(plan, self.limits, running=engine.running_count, reserved=engine.reserved_places)

    # Memory: which calls yield it, and which contexts are held.

    def snapshot(self, now: float) -> EngineSnapshot:
        """The engine at this instant. It is valid until the next event."""
        return EngineSnapshot(
            now,
            self._parts,
            cost=self.step_cost.model,
            policy=self.policy,
            delivered=self.output_tokens,
            pinned_kv_tokens=self._holds.tokens,
        )

    @property
    def last_yields(self) -> bool:
        """Whether the call that started last yields first, as in vLLM's FCFS; else the first of `victims`."""
        return self.policy.name == "fcfs" and (self.bypass or not self._census.owed)

    def victims(self, now: float) -> list[CallId]:
        """The running calls in the order in which they yield their memory to a running call."""
        return [known.call.id for known in self.snapshot(now).all_victims()]

    def hold(self, now: float, call_id: CallId, *, context_tokens: int) -> bool:
        """Whether the driver must hold the blocks of a call that has just finished, for the session's return. The call
        must still be known. `take_released` says when to free them."""
        known = self._calls.get(call_id)
        if known is None or self.bypass:
            return False
        return self._holds.hold(now, known, context_tokens=context_tokens, cost=self.cost)

    def take_released(self, now: float) -> list[CallId]:
        """The calls whose held blocks the driver must free now: their session is back, or their time is over."""
        return self._holds.take_released(now)

    def release_one(self) -> CallId | None:
        """The held context that gives way to a call that needs memory; None if nothing is held."""
        return self._holds.release_one()

    def release_all(self) -> list[CallId]:
        """All held contexts, because the cache is reset or the engine is in bypass."""
        return self._holds.release_all()

    # Commands of the operator.

    def begin_switch(self, now: float, name: str, parameters: Mapping[str, float]) -> policy_switch.PolicySwitch:
        """A switch to another policy, for `end_switch`. Before that the driver must let it `learn`, and may release its
        lock meanwhile. A switch that has begun and not ended is dropped. Raises `policies.UnknownPolicy` and
        `policies.BadParameter`; then nothing has changed."""
        self._switch = policy_switch.PolicySwitch(now, lambda: self._policy(name, parameters), self._calls)
        return self._switch

    def end_switch(
        self, now: float, switch: policy_switch.PolicySwitch, reason: str, *, bypass: bool = False
    ) -> Switched:
        """Switches the policy of all queues at once. `bypass` lasts until the next switch; the driver must then free all
        held contexts (`release_all`)."""
        self._switch = None
        policy = switch.complete(now, self._calls, self._batch, self._tokens)
        waiting_queue.switch(self.queues, policy)
        previous, self.policy = self.policy, policy
        self._batch.bounds.clear()
        self._reason, self._since_s = reason[:KEPT_REASON], now
        self.bypass = bypass
        return Switched(policy=policy.name, previous=previous.name, reordered=self.waiting)

    def set_policy(
        self, now: float, name: str, parameters: Mapping[str, float], reason: str, *, bypass: bool = False
    ) -> Switched:
        """A whole switch, as `begin_switch` and `end_switch`."""
        switch = self.begin_switch(now, name, parameters)
        switch.learn()
        return self.end_switch(now, switch, reason, bypass=bypass)

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        """Sets the bounds that are not None, and returns both as they are in force. Bounds only tighten the engine's own
        limits, and `bounds` raises each to its floor."""
        self._wanted = Controls(
            max_running=self._wanted.max_running if max_running is None else max_running,
            max_step_tokens=self._wanted.max_step_tokens if max_step_tokens is None else max_step_tokens,
        )
        return self._controls()

    def state(self, now: float, *, kv_usage: float, max_waiting_ids: int = SHOWN_WAITING) -> State:
        """The engine at this instant, with the ids of the first waiting calls."""
        return replace(self.counts(now, kv_usage=kv_usage), waiting_ids=self.waiting_later(max_waiting_ids)())

    def waiting_later(self, limit: int) -> Callable[[], tuple[str, ...]]:
        """The ids of the first waiting calls as they stand now, at most `limit`. The caller may compute them after it has
        released its lock, because their order costs more than the rest of a state."""
        queues = [queue.later() for queue in self.queues] if limit else []

        def listed() -> tuple[str, ...]:
            ids: list[str] = []
            for first in queues:
                ids += [item.call.id for item in first(limit - len(ids))]
            return tuple(ids)

        return listed

    def counts(self, now: float, *, kv_usage: float) -> State:
        """The engine at this instant, without the ids of the waiting calls."""
        return State(
            policy=self.policy.name,
            policy_parameters=self.policy.parameters,
            policy_reason=self._reason,
            policy_age_s=now - self._since_s,
            bypass=self.bypass,
            controls=self._controls(),
            running=self.running,
            waiting=self.waiting,
            waiting_by_lane=sum((Counter(queue.by_lane()) for queue in self.queues), Counter()),
            kv_usage=kv_usage,
            preemptions=self.preemptions,
        )

    def watch(self, now: float) -> window.Recorder:
        """A recorder that counts every event from now on, until `unwatch`. Watchers with different periods do not share
        windows, so each has its own."""
        watch = window.Recorder(now)
        self._watches.append(watch)
        return watch

    def cut(self, now: float, watch: window.Recorder) -> WatchReport:
        """The watcher's window since its last cut."""
        calls = self._calls
        return WatchReport(
            policy=self.policy.name,
            policy_parameters=self.policy.parameters,
            bypass=self.bypass,
            window=watch.cut(
                now,
                waiting=self.waiting,
                tokens=lambda call_id: calls[call_id].output_tokens if call_id in calls else 0,
            ),
        )

    def unwatch(self, watch: window.Recorder) -> None:
        self._watches.remove(watch)

    # The machinery.

    def _policy(self, name: str, parameters: Mapping[str, float] | None) -> guarded_policy.GuardedPolicy:
        step_cost = self.step_cost
        context = policies.SchedulerContext(
            cost=lambda: step_cost.model, cached_tokens=self._probe.cached_tokens, random=random.Random(0)
        )
        return guarded_policy.GuardedPolicy(policies.create(name, parameters, context), self.failures)

    def _counted(
        self, now: float, computed: Mapping[CallId, policies.Computed]
    ) -> tuple[Mapping[CallId, policies.Computed], int]:
        """Counts the tokens of a step. Returns those of the known calls, and their sum."""
        calls, tokens = self._calls, self._tokens
        others, first = tokens.add(computed), tokens.newest()
        unknown = [call_id for call_id in (*others, *first) if call_id not in calls] if others or first else ()
        if unknown:
            for call_id in unknown:
                tokens.forget(call_id)
            computed = {call_id: count for call_id, count in computed.items() if call_id in calls}
            others = [call_id for call_id in others if call_id in calls]
            first = [call_id for call_id in first if call_id in calls]
        prompt_sum, output_sum = 0, len(computed) - len(others)
        most = min(output_sum, 1)
        for call_id in others:
            prompt_tokens, output_tokens = computed[call_id]
            if prompt_tokens:
                prompt_sum += prompt_tokens
                self._batch.fill(call_id)
            if output_tokens:
                output_sum += output_tokens
                most = max(most, output_tokens)
                self._batch.decode(calls[call_id])
        for call_id in first:
            calls[call_id].first_at_s = now
            self._batch.decode(calls[call_id])
            for watch in self._watches:
                with self.failures.caught("watch"):
                    watch.on_first_token(now, call_id)
        self.prompt_tokens += prompt_sum
        self.output_tokens += output_sum
        self._batch.bounds.on_step(most)
        return computed, prompt_sum + output_sum

    def _rekey(self, changed: policies.Changed) -> None:
        if changed:
            for queue in self.queues:
                queue.rekey(changed)

    def _note(self, call_id: CallId) -> None:
        """A call came, changed or left."""
        if self._switch is not None:
            self._switch.note(call_id)

    def _controls(self) -> Controls:
        """The operator's bounds as they are in force now."""
        plan, wanted = self._bounded(), self._acting_bounds()
        return Controls(
            max_running=plan.max_running if wanted.max_running else 0,
            max_step_tokens=plan.max_step_tokens if wanted.max_step_tokens else 0,
        )

    def _acting_bounds(self) -> Controls:
        """The bounds that the operator asked for, unless a bypass lifts them."""
        return Controls() if self.bypass else self._wanted

    def _bounded(self) -> StepPlan:
        """The operator's bounds as a plan."""
        wanted = self._acting_bounds()
        if not (wanted.max_running or wanted.max_step_tokens):
            return self._unbounded
        plan = StepPlan(
            max_running=wanted.max_running or self.limits.max_running,
            max_step_tokens=wanted.max_step_tokens or self.limits.max_step_tokens,
        )
        return bounds.safe(plan, self.limits, running=self.running, reserved=self._probe.reserved_places())
