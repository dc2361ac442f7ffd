"""A switch of the policy that the engine does not wait for: events come while the new policy learns of the calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core
from tidegate_policy.engine.step import EngineLimits
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed

COST = CostModel(step_s=0.02, prefill_s=1e-3)
LIMITS = EngineLimits(max_running=4, max_step_tokens=100)
WITHOUT_MEMORY = ["edf", "fcfs", "llf", "priority", "sjf", "srtf", "urgency"]


class Remembering(policies.StaticPolicy):
    """Remembers what it hears, and raises in one hook if it is told to."""

    name = "remembering"
    keys_change = True
    raises = ""

    def __init__(self, context: policies.SchedulerContext | None = None, **parameters: float) -> None:
        super().__init__(context, **parameters)
        self.heard: list[tuple[str, str]] = []

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return ()

    def hear(self, event: str, call_id: str) -> policies.Changed:
        self.heard.append((event, call_id))
        if event == type(self).raises:
            raise RuntimeError("a test")
        return policies.NONE_CHANGED

    def on_arrival(self, now, item) -> policies.Changed:
        return self.hear("arrival", item.call.id)

    def on_start(self, now, item) -> policies.Changed:
        return self.hear("start", item.call.id)

    def on_preemption(self, now, item) -> policies.Changed:
        return self.hear("preemption", item.call.id)

    def on_end(self, now, call_id) -> policies.Changed:
        return self.hear("end", call_id)


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> type[Remembering]:
    monkeypatch.setitem(policies.POLICIES, "remembering", Remembering)
    monkeypatch.setattr(Remembering, "raises", "")
    return Remembering


class Engine:
    """An engine core and the calls in it."""

    def __init__(self, policy: str = "fcfs") -> None:
        self.core = engine_core.EngineCore(0.0, cost=COST, limits=LIMITS, policy=policy)
        self.queue = self.core.queues[0]
        self.now = 0.0
        self.outputs: dict[CallId, int] = {}

    def arrive(self, name: str, **fields: object) -> None:
        known = Call(id=CallId(name), arrived_at_s=self.now, prompt_tokens=50, **{"output_predicted": 10, **fields})  # type: ignore[arg-type]
        self.queue.push(self.core.on_arrival(self.now, known))

    def start(self) -> None:
        if len(self.queue):
            self.outputs[self.queue.pop(self.now).call.id] = 0

    def step(self) -> None:
        self.now += 1.0
        for call_id in self.outputs:
            self.outputs[call_id] += 1
        self.core.on_step(self.now, step_s=1.0, computed=dict.fromkeys(self.outputs, Computed(0, 1)), ended={})

    def preempt(self) -> None:
        if self.outputs:
            call_id, output_tokens = self.outputs.popitem()
            again = self.core.on_preemption(self.now, call_id, output_tokens=output_tokens)
            self.queue.push_preempted(again)

    def update(self) -> None:
        known = next(iter(self.queue), None)
        if known is not None:
            self.core.on_update(with_more_input(known.call))

    def end(self) -> None:
        if self.outputs:
            call_id = next(iter(self.outputs))
            del self.outputs[call_id]
            self.core.on_end(self.now, call_id, finished=True)

    def abort(self) -> None:
        known = next(iter(self.queue), None)
        if known is not None:
            self.queue.remove(known.call.id)
            self.core.on_end(self.now, known.call.id, finished=False)

    def act(self, event: tuple[str, dict[str, object]], name: str) -> None:
        kind, fields = event
        if kind == "arrive":
            self.arrive(name, **fields)
        else:
            getattr(self, kind)()


def with_more_input(call: Call) -> Call:
    """A session's call with more input."""
    return Call(
        id=call.id, arrived_at_s=call.arrived_at_s, prompt_tokens=call.prompt_tokens + 7,
        output_predicted=call.output_predicted, urgency=call.urgency, tenant=call.tenant, group=call.group,
    )  # fmt: skip


def test_a_new_policy_hears_of_the_calls_that_came_changed_or_left_while_it_learnt(
    remembering: type[Remembering],
) -> None:
    engine = Engine()
    for name in ("a", "b", "c", "d"):
        engine.arrive(name)
    engine.start()
    engine.start()
    engine.step()
    switch = engine.core.begin_switch(engine.now, "remembering", {})
    engine.end()  # a
    switch.learn()
    engine.preempt()  # b
    engine.abort()  # b stands first
    engine.start()  # c
    engine.arrive("e")
    engine.core.end_switch(engine.now, switch, "a test")
    assert engine.core.policy.unguarded.heard == [  # type: ignore[attr-defined]
        ("arrival", "a"), ("arrival", "b"), ("arrival", "c"), ("arrival", "d"),
        ("end", "a"), ("end", "b"), ("arrival", "e"), ("start", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize("hook", ["arrival", "start", "end"])
def test_a_policy_that_raises_while_it_learns_takes_over_under_guard(
    hook: str, remembering: type[Remembering], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.arrive(name)
    engine.start()
    engine.step()
    engine.start()
    monkeypatch.setattr(remembering, "raises", hook)
    switch = engine.core.begin_switch(engine.now, "remembering", {})
    engine.end()
    switch.learn()
    switched = engine.core.end_switch(engine.now, switch, "a test")
    assert switched.policy == "remembering"
    assert engine.core.failures.counts["remembering.replay"] == 1


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_a_new_policy_asks_no_probe_while_it_learns(policy: str) -> None:
    asked: list[CallId] = []
    context = policies.SchedulerContext(cached_tokens=lambda call_id: asked.append(call_id) or 0)
    fresh = policies.create(policy, context=context)
    items = [
        policies.QueuedRequest(
            call=Call(
                id=CallId(f"c{number}"), arrived_at_s=0.0, prompt_tokens=100, output_predicted=10, group="g", session="s",
                tool="search", tool_s=1.0,
            ),
            service_s=1.0,
        )
        for number in range(20)
    ]  # fmt: skip
    policies.replay_arrivals(fresh, 100.0, items)
    assert not asked


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "start", "step", "preempt", "update", "end", "abort"]),
        st.fixed_dictionaries(
            {},
            optional={
                "output_predicted": st.integers(1, 40),
                "urgency": st.integers(0, 4),
                "tenant": st.sampled_from("xyz"),
                "group": st.sampled_from(["g", "h"]),
                "session": st.just("s"),
            },
        ),
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_no_call_is_lost_in_a_switch_during_which_calls_come_and_go(policy: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(EVENTS, EVENTS, EVENTS)
    def holds(before, first, second) -> None:
        together, apart = Engine(), Engine()
        for engine in (together, apart):
            for number, event in enumerate(before):
                engine.act(event, f"a{number}")
        switch = apart.core.begin_switch(apart.now, policy, {})
        for number, event in enumerate(first):
            apart.act(event, f"b{number}")
        switch.learn()
        for number, event in enumerate(second):
            apart.act(event, f"c{number}")
        apart.core.end_switch(apart.now, switch, "a test")
        for number, event in enumerate(first):
            together.act(event, f"b{number}")
        for number, event in enumerate(second):
            together.act(event, f"c{number}")
        together.core.set_policy(together.now, policy, {}, "a test")
        assert not apart.core.failures.counts
        orders = [[item.call.id for item in engine.queue] for engine in (together, apart)]
        assert sorted(orders[0]) == sorted(orders[1])
        if policy in WITHOUT_MEMORY:
            assert orders[0] == orders[1]
        while len(apart.queue):
            apart.start()
            apart.step()
        assert not apart.core.waiting

    holds()
