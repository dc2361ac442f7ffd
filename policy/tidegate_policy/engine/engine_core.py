"""The state machine of one engine, in one file because all its events and commands change one state.

Events with their instants go in; the plan of the next step comes out. It owns the scheduling policy, the
waiting queues under it, the knowledge of each call from arrival to end, the bounds of the operator, the service counters
and the recorders of quality of service. It owns no clock, lock or thread: the driver serialises all methods. The driver is
`tidegate_engine.scheduler` in vLLM and `tidegate_sim.realtime` in the engine double.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_policy import policies, waiting_queue, window
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import bounds, guarded_policy, output_prior
from tidegate_policy.engine.engine_status import KEPT_REASON, SHOWN_WAITING, Controls, State, Switched, WatchReport
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.step import EngineLimits, StepFacts, StepPlan
from tidegate_policy.model import Call, CallId


@dataclass(slots=True)
class _Known:
    """A call from its arrival to its end."""

    item: policies.QueuedRequest
    prompt_tokens: int = 0
    """Prompt tokens that steps computed for it so far."""
    output_tokens: int = 0


@dataclass(slots=True, eq=False)
class QosWatch:
    """One watcher of the engine. Watchers with different periods do not share windows."""

    recorder: window.Recorder
    busy_mark_s: float
    """The engine's busy seconds at the last cut."""


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
        queues: int = 1,
        report: Callable[[str, Exception], object] | None = None,
    ) -> None:
        """`report` receives the first exception of each hook of a policy or regulator. Raises `policies.UnknownPolicy`
        and `policies.BadParameter`."""
        self.limits = limits
        self.failures = guarded_policy.Failures(report)
        self.policy = guarded_policy.GuardedPolicy(policies.create(policy, parameters), self.failures)
        self.queues = [waiting_queue.WaitingQueue(self.policy, rekey=self._rekey) for _ in range(queues)]
        """All under one policy, in the order in which the engine serves them; vLLM has two."""
        self.preemptions = 0
        self.busy_s = 0.0
        """Seconds in which a step ran, since the start."""
        self.prompt_tokens = 0
        """Prompt tokens computed since the start."""
        self.output_tokens = 0
        self.output_prior = output_prior.OutputPrior()
        self._cost = cost
        self._regulators = regulators
        self._reason = "at start"
        self._since_s = now
        self._calls: dict[CallId, _Known] = {}
        self._wanted = Controls()
        """The bounds that the operator asked for, before `bounds` raises them to their floors."""
        self._watches: list[QosWatch] = []
        self._preempted: list[CallId] = []
        self._ended: list[CallId] = []
        self._plan = self._bounded()

    # Facts that the driver reads.

    @property
    def plan(self) -> StepPlan:
        """The current plan; reading it uses up nothing."""
        return self._plan

    @property
    def waiting(self) -> int:
        return sum(map(len, self.queues))

    @property
    def running(self) -> int:
        return len(self._calls) - self.waiting

    def item(self, call_id: CallId) -> policies.QueuedRequest:
        """The call and the work that is left of it. Raises `KeyError`."""
        return self._calls[call_id].item

    def service(self, call_id: CallId) -> policies.Computed:
        """The tokens that steps computed for a call since its arrival. Raises `KeyError`."""
        known = self._calls[call_id]
        return policies.Computed(known.prompt_tokens, known.output_tokens)

    def rank(self, call_id: CallId) -> policies.Key:
        """The lane and key of a call in one tuple. The engine preempts the running call with the greatest rank."""
        return self.policy.rank(self.item(call_id))

    # Events.

    def on_arrival(self, now: float, call: Call) -> policies.QueuedRequest:
        """A call entered the engine. The driver pushes the returned request into a queue."""
        item = policies.QueuedRequest(call=call, service_s=self._cost.call_seconds(call))
        self._calls[call.id] = _Known(item)
        for watch in self._watches:
            watch.recorder.on_arrival(call, item.service_s)
        self._rekey(self.policy.on_arrival(now, item))
        return item

    def on_update(self, call: Call) -> policies.QueuedRequest:
        """A call that is in the engine has changed: its session has sent more input. Raises `KeyError`."""
        known = self._calls[call.id]
        known.item = policies.QueuedRequest(call=call, service_s=self._cost.call_seconds(call))
        for queue in self.queues:
            if call.id in queue:
                queue.update(known.item)
        return known.item

    def on_preemption(self, now: float, call_id: CallId, *, output_tokens: int) -> policies.QueuedRequest:
        """A running call lost its KV blocks. The driver pushes the returned request before its equals.

        The call must compute its prompt and its `output_tokens` again before it decodes the rest (Semantic Alg 4)."""
        known = self._calls[call_id]
        call = known.item.call
        left = replace(
            call,
            prompt_tokens=call.prompt_tokens + output_tokens,
            output_predicted=max(call.output_predicted - output_tokens, 1),
        )
        known.item = policies.QueuedRequest(call=call, service_s=self._cost.call_seconds(left))
        self.preemptions += 1
        if self._regulators:
            self._preempted.append(call_id)
        for watch in self._watches:
            watch.recorder.on_preemption()
        self._rekey(self.policy.on_preemption(now, known.item))
        return known.item

    def on_end(self, now: float, call_id: CallId, *, finished: bool) -> None:
        """A call left the engine: finished, or aborted or failed. Ids that are not known are ignored."""
        known = self._calls.pop(call_id, None)
        if known is None:
            return
        if finished:
            self.output_prior.observe(known.output_tokens)
        if self._regulators:
            self._ended.append(call_id)
        for watch in self._watches:
            watch.recorder.on_end(now, call_id, finished=finished)
        self._rekey(self.policy.on_end(now, call_id))

    def on_step(
        self,
        now: float,
        *,
        step_s: float,
        computed: Mapping[CallId, policies.Computed],
        ended: Mapping[CallId, bool],
        running: Iterable[CallId],
        kv_usage: float,
    ) -> StepPlan:
        """A step ended. `ended` maps each call that ended in it to whether it finished. Returns the next plan, which
        `take_plan` also returns."""
        self.busy_s += step_s
        computed = {call_id: tokens for call_id, tokens in computed.items() if call_id in self._calls}
        for call_id, tokens in computed.items():
            self._count(now, call_id, tokens)
        if self.policy.keys_change:
            self._rekey(self.policy.on_tokens(now, computed))
        for call_id, finished in ended.items():
            self.on_end(now, call_id, finished=finished)
        if self._regulators:
            self._plan = self._shaped(self._facts(now, step_s, computed, running, kv_usage))
        elif self._wanted.max_step_tokens:
            self._plan = self._rebounded()  # the floor of the token bound falls with the calls that run
        return self._plan

    def take_plan(self) -> StepPlan:
        """The plan for the step that the driver starts now. Its starts and preemptions hold for this one step."""
        self._rekey(self.policy.begin_step())
        plan = self._plan
        if plan.max_starts is not None or plan.preempt:
            self._plan = replace(plan, max_starts=None, preempt=())
        return plan

    # Commands of the operator.

    def set_policy(self, now: float, name: str, parameters: Mapping[str, float], reason: str) -> Switched:
        """Switches the policy of all queues at once. Raises `policies.UnknownPolicy` and `policies.BadParameter`; then
        nothing has changed."""
        policy = guarded_policy.GuardedPolicy(policies.create(name, parameters), self.failures)
        if policies.hears(policy.unguarded):
            self._replay(now, policy)
        waiting_queue.switch(self.queues, policy)
        previous, self.policy = self.policy, policy
        self._reason, self._since_s = reason[:KEPT_REASON], now
        return Switched(policy=policy.name, previous=previous.name, reordered=self.waiting)

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        """Sets the bounds that are not None, and returns both as they are in force. Bounds only tighten the engine's own
        limits, and `bounds` raises each to its floor."""
        self._wanted = Controls(
            max_running=self._wanted.max_running if max_running is None else max_running,
            max_step_tokens=self._wanted.max_step_tokens if max_step_tokens is None else max_step_tokens,
        )
        self._plan = self._rebounded()
        return self._controls()

    def state(self, now: float, *, kv_usage: float) -> State:
        """The engine at this instant. It lists at most `SHOWN_WAITING` waiting calls."""
        return replace(self.counts(now, kv_usage=kv_usage), waiting_ids=self.waiting_later()())

    def waiting_later(self) -> Callable[[], tuple[str, ...]]:
        """The ids of the first waiting calls as they stand now. The caller may compute them after it has released its
        lock, because their order costs more than the rest of a state."""
        queues = [queue.later() for queue in self.queues]

        def listed() -> tuple[str, ...]:
            ids: list[str] = []
            for first in queues:
                ids += [item.call.id for item in first(SHOWN_WAITING - len(ids))]
            return tuple(ids)

        return listed

    def counts(self, now: float, *, kv_usage: float) -> State:
        """The engine at this instant, without the ids of the waiting calls."""
        return State(
            policy=self.policy.name,
            policy_parameters=self.policy.parameters,
            policy_reason=self._reason,
            policy_age_s=now - self._since_s,
            controls=self._controls(),
            running=self.running,
            waiting=self.waiting,
            kv_usage=kv_usage,
            preemptions=self.preemptions,
        )

    def watch(self, now: float) -> QosWatch:
        """A watcher that counts every event from now on, until `unwatch`."""
        watch = QosWatch(window.Recorder(now), self.busy_s)
        self._watches.append(watch)
        return watch

    def cut(self, now: float, watch: QosWatch, *, kv_usage: float) -> WatchReport:
        """The watcher's window since its last cut."""
        busy_s, watch.busy_mark_s = self.busy_s - watch.busy_mark_s, self.busy_s
        return WatchReport(
            policy=self.policy.name,
            policy_parameters=self.policy.parameters,
            window=watch.recorder.cut(now, running=self.running, waiting=self.waiting, kv_usage=kv_usage),
            busy_s=busy_s,
        )

    def unwatch(self, watch: QosWatch) -> None:
        self._watches.remove(watch)

    # The machinery.

    def _facts(
        self,
        now: float,
        step_s: float,
        computed: Mapping[CallId, policies.Computed],
        running: Iterable[CallId],
        kv_usage: float,
    ) -> StepFacts:
        """The facts of a step; the record of preempted and ended calls begins again."""
        facts = StepFacts(
            now=now,
            step_s=step_s,
            computed=computed,
            running=tuple(running),
            waiting=self.waiting,
            kv_usage=kv_usage,
            preempted=tuple(self._preempted),
            ended=tuple(self._ended),
            limits=self.limits,
        )
        self._preempted.clear()
        self._ended.clear()
        return facts

    def _count(self, now: float, call_id: CallId, tokens: policies.Computed) -> None:
        known = self._calls[call_id]
        known.prompt_tokens += tokens.prompt_tokens
        known.output_tokens += tokens.output_tokens
        self.prompt_tokens += tokens.prompt_tokens
        self.output_tokens += tokens.output_tokens
        if tokens.output_tokens:
            for watch in self._watches:
                watch.recorder.on_tokens(now, call_id, tokens.output_tokens)

    def _rekey(self, changed: policies.Changed) -> None:
        if changed:
            for queue in self.queues:
                queue.rekey(changed)

    def _replay(self, now: float, policy: policies.Policy) -> None:
        policies.replay(
            policy,
            now,
            [
                policies.History(
                    item=known.item,
                    computed=policies.Computed(known.prompt_tokens, known.output_tokens),
                    waits=any(call_id in queue for queue in self.queues),
                )
                for call_id, known in self._calls.items()
            ],
        )

    def _controls(self) -> Controls:
        """The operator's bounds as they are in force now."""
        plan = self._bounded()
        return Controls(
            max_running=plan.max_running if self._wanted.max_running else 0,
            max_step_tokens=plan.max_step_tokens if self._wanted.max_step_tokens else 0,
        )

    def _rebounded(self) -> StepPlan:
        """The present plan under the operator's bounds as they are in force now."""
        plan = self._plan
        return replace(self._bounded(), keep=plan.keep, preempt=plan.preempt, max_starts=plan.max_starts)

    def _bounded(self) -> StepPlan:
        """The operator's bounds as a plan."""
        plan = StepPlan(
            max_running=self._wanted.max_running or self.limits.max_running,
            max_step_tokens=self._wanted.max_step_tokens or self.limits.max_step_tokens,
        )
        return bounds.safe(plan, self.limits, running=self.running)

    def _shaped(self, facts: StepFacts) -> StepPlan:
        """The operator's bounds, tightened by the regulators, and made safe."""
        outer = plan = self._bounded()
        for regulator in self._regulators:
            plan = guarded_policy.shaped(regulator, facts, plan, self.failures)
        plan = replace(
            plan,
            max_running=min(plan.max_running, outer.max_running),
            max_step_tokens=min(plan.max_step_tokens, outer.max_step_tokens),
        )
        return bounds.safe(plan, self.limits, running=self.running)
