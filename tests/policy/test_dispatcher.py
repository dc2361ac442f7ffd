"""Every call leaves exactly once, backlogs return to zero, and calls wait where they are told to."""

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate_policy import choose, cost, policies
from tidegate_policy.dispatcher import Action, Dispatcher, Drop, EngineState, Limits, Send
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, CallId, DropReason, EngineId

FAST = cost.CostModel(step_s=0.02, prefill_s=1e-4, max_batch=4)
SLOW = cost.scaled(FAST, 2.0)


def call(name: str, *, due_s: float | None = None, deadline_s: float | None = None, output: int = 20) -> Call:
    return Call(
        id=CallId(name),
        arrival_s=0.0,
        prompt_tokens=100,
        output_predicted=output,
        due_s=due_s,
        deadline_s=deadline_s,
    )


def dispatcher(policy: str = "fcfs", *, cap: int | None = None, engines: int = 2, **limits: float) -> Dispatcher:
    made = Dispatcher(
        policy=policy,
        dispatch=choose.Dispatch(),
        limits=Limits(**limits),  # type: ignore[arg-type]
        rng=random.Random(0),
    )
    for index in range(engines):
        made.on_engine(0.0, EngineState(id=EngineId(f"e{index}"), cost=(FAST, SLOW)[index % 2], cap=cap))
    return made


def sent(actions: list[Action]) -> list[str]:
    return [action.call.id for action in actions if isinstance(action, Send)]


def dropped(actions: list[Action]) -> list[DropReason]:
    return [action.reason for action in actions if isinstance(action, Drop)]


def test_without_a_cap_every_call_goes_out_on_arrival() -> None:
    gate = dispatcher()
    assert [sent(gate.on_arrival(0.0, call(str(i)))) for i in range(20)] == [[str(i)] for i in range(20)]


def test_with_a_cap_the_rest_wait_in_the_active_order_and_bind_late() -> None:
    gate = dispatcher("edf", cap=1, engines=1)
    assert sent(gate.on_arrival(0.0, call("first"))) == ["first"]
    assert sent(gate.on_arrival(0.0, call("late", due_s=50.0))) == []
    assert sent(gate.on_arrival(0.0, call("soon", due_s=5.0))) == []
    assert sent(gate.on_finish(1.0, CallId("first"))) == ["soon"]
    assert sent(gate.on_finish(2.0, CallId("soon"))) == ["late"]


def test_others_calls_count_against_the_cap() -> None:
    gate = dispatcher(cap=2, engines=1)
    gate.on_engine(0.0, EngineState(id=EngineId("e0"), cost=FAST, cap=2, others=Backlog(calls=2)))
    assert sent(gate.on_arrival(0.0, call("a"))) == []
    assert sent(gate.on_engine(1.0, EngineState(id=EngineId("e0"), cost=FAST, cap=2))) == ["a"]


def test_a_switch_reorders_those_who_wait() -> None:
    gate = dispatcher("fcfs", cap=1, engines=1)
    for each in (call("out"), call("long", output=500), call("short", output=5)):
        gate.on_arrival(0.0, each)
    assert gate.on_policy("sjf") == 2
    assert [waiting.id for waiting in gate.waiting_calls()] == ["short", "long"]


def test_a_refused_call_goes_to_another_engine_once_each() -> None:
    gate = dispatcher()
    (first,) = gate.on_arrival(0.0, call("a"))
    (second,) = gate.on_refused(0.1, CallId("a"))
    assert isinstance(first, Send)
    assert isinstance(second, Send)
    assert (second.attempt, second.decision.engine != first.decision.engine) == (2, True)


def test_a_call_that_every_engine_refused_is_dropped() -> None:
    gate = dispatcher(engines=1)
    gate.on_arrival(0.0, call("a"))
    assert dropped(gate.on_refused(0.1, CallId("a"))) == [DropReason.NO_ENGINES]
    assert gate.own_backlog(EngineId("e0")) == NO_BACKLOG


def test_no_engines_at_all_is_said_at_once() -> None:
    assert dropped(dispatcher(engines=0).on_arrival(0.0, call("a"))) == [DropReason.NO_ENGINES]


def test_a_full_queue_is_saturated_and_says_when_to_come_back() -> None:
    gate = dispatcher(cap=1, engines=1, max_waiting=1)
    for name in "ab":
        gate.on_arrival(0.0, call(name, output=500))
    (drop,) = gate.on_arrival(0.0, call("c"))
    assert isinstance(drop, Drop)
    assert drop.reason is DropReason.SATURATED
    assert drop.retry_after_s == pytest.approx(FAST.backlog_seconds(FAST.charge(call("a", output=500))))


def test_where_nothing_may_wait_an_engine_with_room_still_gets_calls() -> None:
    gate = dispatcher(cap=1, engines=1, max_waiting=0)
    assert sent(gate.on_arrival(0.0, call("a"))) == ["a"]
    assert dropped(gate.on_arrival(0.0, call("b"))) == [DropReason.SATURATED]
    assert (gate.waiting, gate.next_expiry_s()) == (0, None)
    assert sent(gate.on_finish(1.0, CallId("a"))) == []
    assert sent(gate.on_arrival(1.0, call("c"))) == ["c"]


def test_a_call_that_waited_too_long_expires() -> None:
    gate = dispatcher(cap=1, engines=1, ttl_s=10.0)
    gate.on_arrival(0.0, call("out"))
    gate.on_arrival(1.0, call("waits"))
    assert gate.next_expiry_s() == 11.0
    assert dropped(gate.on_tick(10.9)) == []
    assert dropped(gate.on_tick(11.0)) == [DropReason.TTL_EXPIRED]
    assert gate.next_expiry_s() is None


def test_a_call_with_a_deadline_waits_until_that_however_long_it_is() -> None:
    gate = dispatcher(cap=1, engines=1, ttl_s=10.0)
    gate.on_arrival(0.0, call("out"))
    gate.on_arrival(0.0, call("patient", deadline_s=500.0))
    gate.on_arrival(0.0, call("none"))
    assert dropped(gate.on_tick(10.0)) == [DropReason.TTL_EXPIRED]
    assert gate.next_expiry_s() == 500.0
    assert dropped(gate.on_tick(499.0)) == []
    assert dropped(gate.on_tick(500.0)) == [DropReason.DEADLINE_UNREACHABLE]


def test_a_call_whose_deadline_passes_while_it_waits_is_not_sent() -> None:
    gate = dispatcher(cap=1, engines=1)
    gate.on_arrival(0.0, call("out"))
    gate.on_arrival(0.0, call("waits", deadline_s=5.0))
    assert dropped(gate.on_finish(6.0, CallId("out"))) == [DropReason.DEADLINE_UNREACHABLE]


@pytest.mark.parametrize("deadline_s", [None, 1e6])
def test_calls_that_are_gone_take_no_memory(deadline_s: float | None) -> None:
    gate = dispatcher()
    gate.on_arrival(0.0, call("stays", deadline_s=2e6))

    def serve(count: int) -> None:
        for index in range(count):
            gate.on_arrival(0.0, call(f"{index}", deadline_s=deadline_s))
            gate.on_finish(0.0, CallId(f"{index}"))

    serve(1000)
    tracemalloc.start()
    try:
        serve(1000)
        before, _ = tracemalloc.get_traced_memory()
        serve(10_000)
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_draining_refuses_new_calls_and_serves_those_who_wait() -> None:
    gate = dispatcher(cap=1, engines=1)
    for name in "ab":
        gate.on_arrival(0.0, call(name))
    gate.on_drain()
    assert dropped(gate.on_arrival(0.0, call("c"))) == [DropReason.DRAINING]
    assert sent(gate.on_finish(1.0, CallId("a"))) == ["b"]


def test_a_backlog_shrinks_with_the_tokens_that_came_out() -> None:
    gate = dispatcher(engines=1)
    gate.on_arrival(0.0, call("a"))
    sizes = [gate.own_backlog(EngineId("e0"))]
    for tokens in (1, 10, 19):
        gate.on_progress(0.5, CallId("a"), tokens)
        sizes.append(gate.own_backlog(EngineId("e0")))
    assert [size.work_us for size in sizes] == sorted((size.work_us for size in sizes), reverse=True)
    assert sizes[-1].output_tokens == 1


def test_an_engine_that_comes_back_still_owes_the_calls_that_are_out_there() -> None:
    gate = dispatcher(engines=1)
    gate.on_arrival(0.0, call("a"))
    owed = gate.own_backlog(EngineId("e0"))
    gate.on_engine_gone(1.0, EngineId("e0"))
    gate.on_engine(2.0, EngineState(id=EngineId("e0"), cost=FAST))
    assert gate.own_backlog(EngineId("e0")) == owed
    gate.on_finish(3.0, CallId("a"))
    assert gate.own_backlog(EngineId("e0")) == NO_BACKLOG


class Life(RuleBasedStateMachine):
    """Any sequence of events: nobody is lost, nobody leaves twice, and no work is left when nobody is out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = dispatcher("fcfs", cap=2)
        self.now = 0.0
        self.inside: set[str] = set()
        self.at: dict[str, str] = {}
        self.count = 0

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            name = action.call.id
            assert name in self.inside
            if isinstance(action, Send):
                assert name not in self.at
                self.at[name] = action.decision.engine
            else:
                assert name not in self.at
                self.inside.remove(name)
                if action.reason is DropReason.TTL_EXPIRED:
                    assert action.call.deadline_s is None
                if action.reason is DropReason.DEADLINE_UNREACHABLE:
                    assert action.call.deadline_s is not None
                    assert action.call.deadline_s <= self.now

    def some_out(self, data: st.DataObject) -> CallId:
        return CallId(data.draw(st.sampled_from(sorted(self.at))))

    @rule(due_s=st.none() | st.floats(0, 50), deadline_s=st.none() | st.floats(0, 100), output=st.integers(1, 50))
    def arrive(self, due_s: float | None, deadline_s: float | None, output: int) -> None:
        self.count += 1
        self.inside.add(str(self.count))
        self.carry_out(
            self.gate.on_arrival(self.now, call(str(self.count), due_s=due_s, deadline_s=deadline_s, output=output))
        )

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.some_out(data)
        del self.at[name]
        self.inside.remove(name)
        self.carry_out(self.gate.on_finish(self.now, name))

    @precondition(lambda self: self.at)
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        self.gate.on_progress(self.now, self.some_out(data), tokens)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        name = self.some_out(data)
        del self.at[name]
        self.carry_out(self.gate.on_refused(self.now, name))

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
        late = [each.id for each in self.gate.waiting_calls() if (each.deadline_s or self.now + 1) <= self.now]
        assert not late

    @rule(index=st.integers(0, 2), cap=st.none() | st.integers(1, 4), accepting=st.booleans())
    def change_engine(self, index: int, cap: int | None, accepting: bool) -> None:
        state = EngineState(id=EngineId(f"e{index}"), cost=FAST, cap=cap, accepting=accepting)
        self.carry_out(self.gate.on_engine(self.now, state))

    @rule(index=st.integers(0, 2))
    def lose_engine(self, index: int) -> None:
        self.carry_out(self.gate.on_engine_gone(self.now, EngineId(f"e{index}")))

    @rule(policy=st.sampled_from(sorted(policies.POLICIES)))
    def switch(self, policy: str) -> None:
        self.gate.on_policy(policy)

    @invariant()
    def everybody_is_accounted_for(self) -> None:
        waiting = {each.id for each in self.gate.waiting_calls()}
        assert waiting | set(self.at) == self.inside
        assert not waiting & set(self.at)

    @invariant()
    def no_engine_owes_work_for_nobody(self) -> None:
        for engine in self.gate.engines():
            backlog = self.gate.own_backlog(engine.id)
            assert min(backlog.calls, backlog.work_us, backlog.output_tokens) >= 0
            if engine.id not in self.at.values():
                assert backlog == NO_BACKLOG

    @invariant()
    def nobody_waits_while_a_willing_engine_is_idle(self) -> None:
        idle = [e for e in self.gate.engines() if e.accepting and e.id not in self.at.values()]
        assert not (len(idle) > 1 and self.gate.waiting)


Life.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestLife = Life.TestCase
