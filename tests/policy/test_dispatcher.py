"""Every call leaves exactly once, backlogs return to zero, and calls wait where the settings say."""

import collections
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate_policy import cost, policies
from tidegate_policy.admit.outliers import OutlierSettings
from tidegate_policy.admit.retries import Failure, RetrySettings
from tidegate_policy.dispatch.core_actions import Action, GiveUp, Send, Shed
from tidegate_policy.dispatch.dispatcher import Dispatcher
from tidegate_policy.dispatch.engine_table import EngineFacts, EngineTable, Health
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_policy.dispatch.waiting_limits import Limits
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, CallId, DropReason, EngineId, WorkflowId

FAST = cost.CostModel(step_s=0.02, prefill_s=1e-4, max_batch=4)
SLOW = cost.scaled(FAST, 2.0)


def call(name: str, *, due_at_s: float | None = None, deadline_at_s: float | None = None, output: int = 20) -> Call:
    return Call(
        id=CallId(name),
        arrived_at_s=0.0,
        prompt_tokens=100,
        output_predicted=output,
        due_at_s=due_at_s,
        deadline_at_s=deadline_at_s,
    )


class Gate:
    """A dispatcher with the table of its engines, and events of engines as the gateway core passes them on. It is no
    subclass, because a compiled dispatcher has none."""

    def __init__(
        self, policy: str = "fcfs", *, max_inflight: int | None = None, engines: int = 2, **limits: float
    ) -> None:
        self.table = EngineTable(max_inflight, OutlierSettings())
        self._dispatcher = Dispatcher(
            self.table,
            policy=policies.create(policy),
            settings=DispatchSettings(),
            limits=Limits(**limits),  # type: ignore[arg-type]
            retry=RetrySettings(max_attempts=5),
            rng=random.Random(0),
        )
        for index in range(engines):
            self.on_engine(0.0, EngineFacts(id=EngineId(f"e{index}"), cost=(FAST, SLOW)[index % 2]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    def on_engine(self, now: float, facts: EngineFacts) -> list[Action]:
        self.table.update(facts, lambda: self.own_backlog(facts.id))
        return self.pump(now)

    def owes(self, engine: str) -> Backlog:
        known = self.table.get(EngineId(engine))
        assert known is not None
        assert known.own == self.own_backlog(EngineId(engine))
        return known.own


dispatcher = Gate


def sent(actions: list[Action]) -> list[str]:
    return [action.call.id for action in actions if isinstance(action, Send)]


def shed(actions: list[Action]) -> list[DropReason]:
    return [action.reason for action in actions if isinstance(action, Shed)]


def test_without_a_bound_every_call_goes_out_on_arrival() -> None:
    gate = dispatcher()
    assert [sent(gate.on_arrival(0.0, call(str(i)))) for i in range(20)] == [[str(i)] for i in range(20)]


def test_the_slack_of_a_decision_is_the_sum_of_its_figures() -> None:
    gate = dispatcher(engines=1)
    for i in range(8):
        gate.on_arrival(0.0, call(str(i)))
    (found,) = gate.on_arrival(1.0, call("last", due_at_s=10.0))
    decision = found.decision
    assert decision.slack_s == pytest.approx(10.0 - 1.0 - decision.service_s - decision.shared_s)
    assert 0 < decision.shared_s < decision.queue_s, "it joins the batch"


def test_with_a_bound_the_rest_wait_under_the_active_policy_and_bind_late() -> None:
    gate = dispatcher("edf", max_inflight=1, engines=1)
    assert sent(gate.on_arrival(0.0, call("first"))) == ["first"]
    assert sent(gate.on_arrival(0.0, call("late", due_at_s=50.0))) == []
    assert sent(gate.on_arrival(0.0, call("soon", due_at_s=5.0))) == []
    assert sent(gate.on_end(1.0, CallId("first"))) == ["soon"]
    assert sent(gate.on_end(2.0, CallId("soon"))) == ["late"]


def test_calls_of_other_gateways_count_against_the_bound() -> None:
    gate = dispatcher(max_inflight=2, engines=1)
    gate.on_engine(0.0, EngineFacts(id=EngineId("e0"), cost=FAST, others=Backlog(calls=2)))
    assert sent(gate.on_arrival(0.0, call("a"))) == []
    assert sent(gate.on_engine(1.0, EngineFacts(id=EngineId("e0"), cost=FAST))) == ["a"]


def test_a_call_goes_to_the_engines_that_it_may_go_to_only() -> None:
    gate = dispatcher(max_inflight=1, engines=3)
    only = frozenset({EngineId("e1")})
    (first,) = gate.on_arrival(0.0, call("a"), only)
    assert isinstance(first, Send)
    assert first.decision.engine == "e1"
    assert gate.on_arrival(0.0, call("b"), only) == [], "others have room, and it waits for its own"
    assert sent(gate.on_arrival(0.0, call("c"))) == ["c"]
    (second,) = gate.on_end(1.0, CallId("a"))
    assert isinstance(second, Send)
    assert (second.call.id, second.decision.engine) == ("b", "e1")


def test_further_engines_are_those_with_room_and_the_least_work_first() -> None:
    table = EngineTable(2, OutlierSettings())
    for name, calls, health in (("a", 1, "up"), ("b", 0, "up"), ("c", 2, "up"), ("d", 0, "down"), ("e", 1, "up")):
        others = Backlog(calls=calls, work_us=1000 * calls * (2 if name == "a" else 1))
        facts = EngineFacts(id=EngineId(name), cost=None, health=Health(health), others=others)
        table.update(facts, lambda: NO_BACKLOG)
    assert table.fallbacks(0.0, "t", EngineId("x"), None, 9) == ["b", "e", "a"], "c is full, and d is down"
    assert table.fallbacks(0.0, "t", EngineId("b"), None, 1) == ["e"]
    assert table.fallbacks(0.0, "t", EngineId("b"), {EngineId("a"), EngineId("c")}, 9) == ["a"]


def test_a_call_that_no_engine_may_serve_is_shed_at_once_and_when_its_engine_goes() -> None:
    gate = dispatcher(max_inflight=1)
    assert shed(gate.on_arrival(0.0, call("a"), frozenset({EngineId("other")}))) == [DropReason.NO_ENGINES]
    only = frozenset({EngineId("e1")})
    gate.on_arrival(0.0, call("b"), only)
    gate.on_arrival(0.0, call("c"), only)
    assert shed(gate.on_engine_gone(1.0, EngineId("e1"))) == [DropReason.NO_ENGINES]


def test_a_failed_call_is_not_tried_at_an_engine_that_it_may_not_go_to() -> None:
    gate = dispatcher()
    gate.on_arrival(0.0, call("a"), frozenset({EngineId("e0")}))
    assert shed(gate.on_attempt_failed(1.0, CallId("a"), Failure.GONE)) == [DropReason.NO_ENGINES]


def test_a_switch_reorders_the_waiting_calls() -> None:
    gate = dispatcher("fcfs", max_inflight=1, engines=1)
    for each in (call("out"), call("long", output=500), call("short", output=5)):
        gate.on_arrival(0.0, each)
    assert gate.on_policy(0.0, policies.create("sjf")) == 2
    assert [waiting.id for waiting in gate.waiting_calls()] == ["short", "long"]


def test_without_engines_a_call_is_shed_at_once() -> None:
    assert shed(dispatcher(engines=0).on_arrival(0.0, call("a"))) == [DropReason.NO_ENGINES]


def test_a_full_queue_is_saturated_and_says_when_to_come_back() -> None:
    gate = dispatcher(max_inflight=1, engines=1, max_waiting=1)
    for name in "ab":
        gate.on_arrival(0.0, call(name, output=500))
    (drop,) = gate.on_arrival(0.0, call("c"))
    assert isinstance(drop, Shed)
    assert drop.reason is DropReason.SATURATED
    assert drop.retry_after_s == pytest.approx(FAST.backlog_seconds(FAST.charge(call("a", output=500))))


def test_a_full_queue_evicts_a_call_of_the_tenant_that_holds_most() -> None:
    gate = dispatcher(engines=1, max_inflight=1, max_waiting=6)
    for _ in range(20):
        gate.tenants.observe(1.0, 1.0)
    gate.on_arrival(0.0, replace(call("quiet"), tenant="quiet"))
    for index in range(6):
        gate.on_arrival(0.0, replace(call(f"flood{index}"), tenant="flood"))
    (evicted,) = gate.on_arrival(0.0, replace(call("quiet2"), tenant="quiet"))
    assert isinstance(evicted, Shed)
    assert (evicted.call.id, evicted.reason) == ("flood5", DropReason.EVICTED)
    assert shed(gate.on_arrival(0.0, replace(call("flood6"), tenant="flood"))) == [DropReason.SATURATED]
    assert {each.id for each in gate.waiting_calls()} == {*(f"flood{index}" for index in range(5)), "quiet2"}


def test_calls_of_a_workflow_that_may_not_start_wait_are_cancelled_and_expire() -> None:
    gate = dispatcher(engines=1)
    for _ in range(20):
        gate.gate.observe("", 0.4, 1.0)
    first, second, third = (
        replace(call(name, deadline_at_s=deadline_at_s), workflow=WorkflowId(name))
        for name, deadline_at_s in (("u", 50.0), ("v", 5.0), ("w", 60.0))
    )
    assert sent(gate.on_arrival(0.0, first)) == ["u"]
    assert gate.on_arrival(0.0, second) == []
    assert gate.on_arrival(0.0, third) == []
    assert shed(gate.on_tick(5.0)) == [DropReason.DEADLINE_UNREACHABLE]
    assert gate.waiting == 1
    assert gate.on_end(6.0, CallId("u")) == [], "its next call may come"
    assert sent(gate.on_workflow_end(6.0, WorkflowId("u"))) == ["w"]
    gate.on_arrival(6.0, replace(call("x"), workflow=WorkflowId("x")))
    assert gate.on_cancel(6.0, CallId("x")) == []
    assert gate.waiting == 0


def test_where_nothing_may_wait_an_engine_with_room_still_gets_calls() -> None:
    gate = dispatcher(max_inflight=1, engines=1, max_waiting=0)
    assert sent(gate.on_arrival(0.0, call("a"))) == ["a"]
    assert shed(gate.on_arrival(0.0, call("b"))) == [DropReason.SATURATED]
    assert (gate.waiting, gate.next_expiry_at_s()) == (0, None)
    assert sent(gate.on_end(1.0, CallId("a"))) == []
    assert sent(gate.on_arrival(1.0, call("c"))) == ["c"]


def test_a_call_that_waited_too_long_expires() -> None:
    gate = dispatcher(max_inflight=1, engines=1, ttl_s=10.0)
    gate.on_arrival(0.0, call("out"))
    gate.on_arrival(1.0, call("waits"))
    assert gate.next_expiry_at_s() == 11.0
    assert shed(gate.on_tick(10.9)) == []
    assert shed(gate.on_tick(11.0)) == [DropReason.TTL_EXPIRED]
    assert gate.next_expiry_at_s() is None


def test_a_call_with_a_deadline_waits_until_that_however_long_it_is() -> None:
    gate = dispatcher(max_inflight=1, engines=1, ttl_s=10.0)
    gate.on_arrival(0.0, call("out"))
    gate.on_arrival(0.0, call("patient", deadline_at_s=500.0))
    gate.on_arrival(0.0, call("none"))
    assert shed(gate.on_tick(10.0)) == [DropReason.TTL_EXPIRED]
    assert gate.next_expiry_at_s() == 500.0
    assert shed(gate.on_tick(499.0)) == []
    assert shed(gate.on_tick(500.0)) == [DropReason.DEADLINE_UNREACHABLE]


def test_a_call_whose_deadline_passes_while_it_waits_is_not_sent() -> None:
    gate = dispatcher(max_inflight=1, engines=1)
    gate.on_arrival(0.0, call("out"))
    gate.on_arrival(0.0, call("waits", deadline_at_s=5.0))
    assert shed(gate.on_end(6.0, CallId("out"))) == [DropReason.DEADLINE_UNREACHABLE]


@pytest.mark.parametrize("deadline_at_s", [None, 1e6])
def test_calls_that_are_gone_take_no_memory(deadline_at_s: float | None) -> None:
    gate = dispatcher()
    gate.on_arrival(0.0, call("stays", deadline_at_s=2e6))

    def serve(count: int) -> None:
        for index in range(count):
            gate.on_arrival(0.0, call(f"{index}", deadline_at_s=deadline_at_s))
            gate.on_end(0.0, CallId(f"{index}"))

    serve(1000)
    tracemalloc.start()
    try:
        serve(1000)
        before, _ = tracemalloc.get_traced_memory()
        serve(10_000)
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_draining_sheds_new_calls_and_serves_the_waiting_calls() -> None:
    gate = dispatcher(max_inflight=1, engines=1)
    for name in "ab":
        gate.on_arrival(0.0, call(name))
    gate.on_drain()
    assert shed(gate.on_arrival(0.0, call("c"))) == [DropReason.DRAINING]
    assert sent(gate.on_end(1.0, CallId("a"))) == ["b"]


def test_a_backlog_shrinks_with_the_tokens_that_came_out() -> None:
    gate = dispatcher(engines=1)
    gate.on_arrival(0.0, call("a"))
    sizes = [gate.owes("e0")]
    for tokens in (1, 10, 19):
        gate.on_progress(0.5, CallId("a"), tokens)
        sizes.append(gate.owes("e0"))
    assert [size.work_us for size in sizes] == sorted((size.work_us for size in sizes), reverse=True)
    assert sizes[-1].output_tokens == 1


def test_an_engine_that_comes_back_still_owes_the_calls_that_are_out_there() -> None:
    gate = dispatcher(engines=1)
    gate.on_arrival(0.0, call("a"))
    owed = gate.owes("e0")
    gate.on_engine_gone(1.0, EngineId("e0"))
    gate.on_engine(2.0, EngineFacts(id=EngineId("e0"), cost=FAST))
    assert gate.owes("e0") == owed
    gate.on_end(3.0, CallId("a"))
    assert gate.owes("e0") == NO_BACKLOG


class Life(RuleBasedStateMachine):
    """Under any sequence of events no call is lost, no call leaves twice, and engines without calls owe no work."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = dispatcher("fcfs", max_inflight=2)
        self.now = 0.0
        self.inside: set[str] = set()
        self.at: dict[str, str] = {}
        self.failed_at: dict[str, set[str]] = collections.defaultdict(set)
        """The engines that failed a call. It does not return to them while another engine may serve it."""
        self.only: dict[str, frozenset[EngineId]] = {}
        """The engines that a call may go to, of a call that may not go to all."""
        self.count = 0

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            name = action.call.id
            assert name in self.inside
            if isinstance(action, Send):
                assert name not in self.at
                assert action.decision.engine in self.only.get(name, {action.decision.engine})
                self.at[name] = action.decision.engine
            else:
                assert name not in self.at
                self.inside.remove(name)
                if isinstance(action, GiveUp):
                    continue
                if action.reason is DropReason.TTL_EXPIRED:
                    assert action.call.deadline_at_s is None
                if action.reason is DropReason.DEADLINE_UNREACHABLE:
                    assert action.call.deadline_at_s is not None
                    assert action.call.deadline_at_s <= self.now

    def some_out(self, data: st.DataObject) -> CallId:
        return CallId(data.draw(st.sampled_from(sorted(self.at))))

    @rule(
        due_at_s=st.none() | st.floats(0, 50),
        deadline_at_s=st.none() | st.floats(0, 100),
        output=st.integers(1, 50),
        tenant=st.sampled_from("ab"),
        workflow=st.none() | st.sampled_from("uvw"),
        only=st.none() | st.frozensets(st.sampled_from([EngineId(f"e{index}") for index in range(3)]), min_size=1),
    )
    def arrive(
        self,
        due_at_s: float | None,
        deadline_at_s: float | None,
        output: int,
        tenant: str,
        workflow: str | None,
        only: frozenset[EngineId] | None,
    ) -> None:
        self.count += 1
        self.inside.add(str(self.count))
        if only is not None:
            self.only[str(self.count)] = only
        arriving = replace(
            call(str(self.count), due_at_s=due_at_s, deadline_at_s=deadline_at_s, output=output),
            tenant=tenant,
            workflow=None if workflow is None else WorkflowId(workflow),
        )
        self.carry_out(self.gate.on_arrival(self.now, arriving, only))

    @rule(demand_s=st.sampled_from([0.3, 1.0]))
    def learn_the_bounds(self, demand_s: float) -> None:
        for _ in range(20):
            self.gate.gate.observe("", 1.0, demand_s)
            self.gate.tenants.observe(1.0, demand_s)

    @rule(workflow=st.sampled_from("uvw"))
    def end_a_workflow(self, workflow: str) -> None:
        self.carry_out(self.gate.on_workflow_end(self.now, WorkflowId(workflow)))

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.some_out(data)
        del self.at[name]
        self.inside.remove(name)
        self.carry_out(self.gate.on_end(self.now, name))

    @precondition(lambda self: self.at)
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        self.gate.on_progress(self.now, self.some_out(data), tokens)

    @precondition(lambda self: self.at)
    @rule(data=st.data(), failure=st.sampled_from(Failure))
    def fail(self, data: st.DataObject, failure: Failure) -> None:
        name = self.some_out(data)
        self.failed_at[name].add(self.at.pop(name))
        self.carry_out(self.gate.on_attempt_failed(self.now, name, failure))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = CallId(data.draw(st.sampled_from(sorted(self.inside))))
        self.inside.remove(name)
        self.at.pop(name, None)
        self.carry_out(self.gate.on_cancel(self.now, name))

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.gate.on_tick(self.now))
        late = [each.id for each in self.gate.waiting_calls() if (each.deadline_at_s or self.now + 1) <= self.now]
        assert not late

    @rule(index=st.integers(0, 2), health=st.sampled_from(Health), others=st.integers(0, 3))
    def change_engine(self, index: int, health: Health, others: int) -> None:
        facts = EngineFacts(id=EngineId(f"e{index}"), cost=FAST, health=health, others=Backlog(calls=others))
        self.carry_out(self.gate.on_engine(self.now, facts))

    @rule(index=st.integers(0, 2))
    def lose_engine(self, index: int) -> None:
        self.carry_out(self.gate.on_engine_gone(self.now, EngineId(f"e{index}")))

    @rule(policy=st.sampled_from(sorted(policies.POLICIES)))
    def switch(self, policy: str) -> None:
        self.gate.on_policy(self.now, policies.create(policy))

    @invariant()
    def every_call_waits_or_is_at_an_engine(self) -> None:
        waiting = {each.id for each in self.gate.waiting_calls()}
        assert waiting | set(self.at) == self.inside
        assert not waiting & set(self.at)

    @invariant()
    def the_counts_of_waiting_calls_are_those_of_the_calls(self) -> None:
        waiting = collections.Counter((each.slo_class, each.tenant) for each in self.gate.waiting_calls())
        assert self.gate.waiting_by_class_and_tenant == waiting
        assert self.gate.waiting_by_tenant == collections.Counter(each.tenant for each in self.gate.waiting_calls())
        assert set(self.gate.waiting_since_s()) == {slo_class for slo_class, _ in waiting}
        assert sum(self.gate.waiting_by_lane().values()) == self.gate.waiting - len(self.gate.gate) - len(
            self.gate.tenants
        )

    @invariant()
    def an_engine_without_calls_owes_nothing(self) -> None:
        for engine in self.gate.table:
            backlog = self.gate.owes(engine.facts.id)
            assert min(backlog.calls, backlog.work_us, backlog.output_tokens) >= 0
            if engine.facts.id not in self.at.values():
                assert backlog == NO_BACKLOG

    @invariant()
    def no_call_waits_while_two_accepting_engines_are_idle_that_have_not_failed_it(self) -> None:
        idle = {engine.facts.id for engine in self.gate.table.accepting(self.now) if not engine.backlog}
        in_gate = {item.call.id for item in self.gate.gate}  # a workflow may wait for one that pauses
        for waiting in self.gate.waiting_calls():
            able = (idle & self.only.get(waiting.id, idle)) - self.failed_at[waiting.id]
            assert waiting.id in in_gate or len(able) < 2

    @invariant()
    def the_shares_remember_no_call_that_has_left(self) -> None:
        assert len(self.gate.tenants._part_of) <= len(self.inside & self.only.keys())


Life.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestLife = Life.TestCase


def test_a_first_token_of_a_flooding_tenant_sends_its_next_call() -> None:
    gate = Gate(engines=1)
    for _ in range(16):
        gate.tenants.observe(9.0, 1.0)
    gate.on_arrival(0.0, replace(call("honest"), tenant="honest"))
    for number in range(60):
        gate.on_arrival(0.0, replace(call(f"flood-{number}"), tenant="flood"))
    sent: list[Action] = []
    for number in range(60):
        if not sent:
            sent = gate.on_end(1.0, CallId(f"flood-{number}"))
    (first,) = sent
    assert first.call.yields
    assert gate.on_end(1.0, CallId("honest")) == []
    (second,) = gate.on_first_token(1.0, first.call.id)
    assert second.call.yields
    assert gate.on_first_token(1.0, first.call.id) == [], "a first token counts once"
