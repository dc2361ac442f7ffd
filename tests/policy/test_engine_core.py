"""The engine core: counts, plans, switches and bounds, without vLLM and without a clock."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import policies
from tidegate_policy.cost import CostModel
from tidegate_policy.engine import bounds, engine_core, regulators, snapshot
from tidegate_policy.engine.engine_status import Controls
from tidegate_policy.engine.step import EngineLimits, StepFacts, StepPlan
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed, QueuedRequest

COST = CostModel(step_s=0.02, prefill_s=1e-3)
LIMITS = EngineLimits(max_running=4, max_step_tokens=100)


def call(name: str, **more: object) -> Call:
    return Call(id=CallId(name), arrived_at_s=0.0, prompt_tokens=50, output_predicted=10, **more)  # type: ignore[arg-type]


def core_with(
    *names: str, policy: str = "fcfs", limits: EngineLimits = LIMITS, **more: object
) -> engine_core.EngineCore:
    core = engine_core.EngineCore(0.0, cost=COST, limits=limits, policy=policy, **more)  # type: ignore[arg-type]
    for name in names:
        core.queues[0].push(core.on_arrival(0.0, call(name)))
    return core


def step(core: engine_core.EngineCore, now: float, computed: dict[str, Computed], **ended: bool) -> StepPlan:
    """A step of the core; returns the plan of the next."""
    core.on_step(
        now,
        step_s=1.0,
        computed={CallId(name): tokens for name, tokens in computed.items()},
        ended={CallId(name): finished for name, finished in ended.items()},
    )
    return core.take_plan(now)


def test_service_is_counted_without_a_watcher() -> None:
    core = core_with("a", "b")
    core.queues[0].pop(0.0)
    step(core, 1.0, {"a": Computed(50, 1)})
    step(core, 2.0, {"a": Computed(0, 1)})
    assert core.service(CallId("a")) == (50, 2)
    assert core.service(CallId("b")) == (0, 0)
    assert (core.prompt_tokens, core.output_tokens, core.busy_s) == (50, 2, 2.0)


def test_a_call_that_ended_is_forgotten_and_late_tokens_of_it_are_ignored() -> None:
    core = core_with("a")
    core.queues[0].pop(0.0)
    step(core, 1.0, {"a": Computed(50, 1)}, a=True)
    step(core, 2.0, {"a": Computed(0, 1)})
    assert core.running == 0
    assert core.output_tokens == 1
    with pytest.raises(KeyError):
        core.service(CallId("a"))


def test_a_preempted_call_has_its_recomputation_as_work() -> None:
    core = core_with("a")
    core.queues[0].pop(0.0)
    again = core.on_preemption(1.0, CallId("a"), output_tokens=4)
    assert again.service_s == pytest.approx(COST.prefill_seconds(54) + COST.decode_seconds(54, 6))
    assert core.preemptions == 1


def test_a_switch_to_an_unknown_policy_or_parameter_changes_nothing() -> None:
    core = core_with("a", "b", policy="sjf")
    before = core.state(1.0, kv_usage=0.0)
    with pytest.raises(policies.UnknownPolicy):
        core.set_policy(1.0, "lifo", {}, "")
    with pytest.raises(policies.BadParameter):
        core.set_policy(1.0, "two-lane", {"fast_share": 2.0}, "")
    assert core.state(1.0, kv_usage=0.0) == before


def test_a_switch_carries_parameters_into_the_state() -> None:
    core = core_with("a")
    switched = core.set_policy(5.0, "two-lane", {"fast_share": 0.5}, "why")
    assert (switched.policy, switched.previous, switched.reordered) == ("two-lane", "fcfs", 1)
    state = core.state(7.0, kv_usage=0.25)
    assert dict(state.policy_parameters) == {"threshold_s": 4.0, "fast_share": 0.5}
    assert (state.policy_reason, state.policy_age_s, state.kv_usage) == ("why", 2.0, 0.25)


class Remembering(policies.StaticPolicy):
    """Writes down the events that it hears."""

    name = "remembering"
    keys_change = True

    def __init__(self, **parameters: float) -> None:
        super().__init__(**parameters)
        self.heard: list[tuple[object, ...]] = []

    def key(self, item: policies.QueuedRequest) -> policies.Key:
        return ()

    def on_arrival(self, now, item):  # type: ignore[no-untyped-def]
        self.heard.append(("arrival", item.call.id))
        return ()

    def on_start(self, now, item):  # type: ignore[no-untyped-def]
        self.heard.append(("start", item.call.id))
        return ()

    def on_tokens(self, now, computed):  # type: ignore[no-untyped-def]
        self.heard += [("tokens", call_id, *tokens) for call_id, tokens in computed.items()]
        return ()

    def on_preemption(self, now, item):  # type: ignore[no-untyped-def]
        self.heard.append(("preemption", item.call.id))
        return ()

    def on_end(self, now, call_id):  # type: ignore[no-untyped-def]
        self.heard.append(("end", call_id))
        return ()


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies.POLICIES, "remembering", Remembering)


@pytest.mark.usefixtures("remembering")
def test_a_policy_hears_every_event_of_a_call() -> None:
    core = core_with("a", policy="remembering")
    queue = core.queues[0]
    queue.pass_over()
    queue.end_scan()
    queue.pop(0.0)
    step(core, 1.0, {"a": Computed(50, 1)})
    queue.push_preempted(core.on_preemption(1.0, CallId("a"), output_tokens=1))
    queue.pop(2.0)
    step(core, 3.0, {"a": Computed(50, 1)}, a=True)
    assert [event[0] for event in core.policy.unguarded.heard] == [  # type: ignore[attr-defined]
        "arrival", "start", "tokens", "preemption", "start", "tokens", "end",
    ]  # fmt: skip


@pytest.mark.usefixtures("remembering")
def test_a_new_policy_hears_of_all_calls_in_the_engine_and_of_their_service() -> None:
    core = core_with("a", "b")
    core.queues[0].pop(0.0)
    step(core, 1.0, {"a": Computed(50, 1)})
    step(core, 2.0, {"a": Computed(0, 1)})
    core.set_policy(3.0, "remembering", {}, "")
    assert core.policy.unguarded.heard == [  # type: ignore[attr-defined]
        ("arrival", "a"), ("arrival", "b"), ("start", "a"), ("tokens", "a", 50, 2),
    ]  # fmt: skip


class Scripted:
    """A regulator that changes each plan in one given way and remembers the facts."""

    SAFETY = False

    def __init__(self, **changes: object) -> None:
        self.changes = changes
        self.facts: list[StepFacts] = []

    def observe(self, facts: StepFacts) -> None:
        self.facts.append(facts)

    def shape(self, engine: snapshot.EngineSnapshot, plan: StepPlan) -> StepPlan:
        return replace(plan, **self.changes)  # type: ignore[arg-type]


class Probe:
    """An engine in which calls run."""

    def __init__(self, **running: int) -> None:
        self.running = running
        self.free = 1000
        self.cached = 0

    def kv_tokens(self, call_id: CallId) -> int:
        return self.running[call_id]

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        return self.running[call_id]

    def free_kv_tokens(self) -> int:
        return self.free

    def shared_tokens(self, call_id: CallId) -> int:
        return 0

    def reserved_places(self) -> int:
        return 0

    def cached_tokens(self, call_id: CallId) -> int:
        return self.cached

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        return iter(waiting)


def test_a_regulator_sees_the_facts_of_a_step_and_shapes_the_next_plan() -> None:
    regulator = Scripted(max_step_tokens=30, max_starts=1, preempt=(CallId("b"),), paused=frozenset({CallId("c")}))
    core = core_with("a", "b", "c", "d", regulators=[regulator], probe=Probe(b=9, c=50, d=50))
    core.queues[0].pop(0.0)
    core.queues[0].pop(0.0)
    core.queues[0].push_preempted(core.on_preemption(0.5, CallId("b"), output_tokens=0))
    for _ in "bcd":
        core.queues[0].pop(0.5)
    plan = step(core, 1.0, {"a": Computed(50, 1), "b": Computed(9, 0)}, a=True)
    (facts,) = regulator.facts
    assert (facts.now, facts.step_s) == (1.0, 1.0)
    assert facts.computed == {"a": (50, 1), "b": (9, 0)}
    assert (facts.preempted, [ended.call.id for ended in facts.ended]) == (("b",), ["a"])
    assert plan == StepPlan(
        max_running=4, max_step_tokens=30, max_starts=1, preempt=(CallId("b"),), paused=frozenset({CallId("c")})
    )


def test_the_bound_of_one_call_leaves_it_the_tokens_that_it_needs() -> None:
    core = core_with(regulators=[Scripted(max_call_tokens=0)], probe=Probe())
    assert core.take_plan(0.0).max_call_tokens == core.limits.tokens_per_sequence
    whole_prompts = replace(core.limits, start_tokens=90)
    plan = bounds.safe(StepPlan(max_running=4, max_step_tokens=100, max_call_tokens=8), whole_prompts, running=1)
    assert plan.max_call_tokens == 90
    assert plan.at_most(call_tokens=95) is plan
    assert plan.at_most(call_tokens=50).max_call_tokens == 50


def test_a_plan_counts_calls_that_arrived_after_the_last_step() -> None:
    core = core_with("a", policy="sjf", regulators=[Scripted()], probe=Probe())
    core.queues[0].push(core.on_arrival(0.0, replace(call("short"), output_predicted=1)))
    head = core.snapshot(0.0).head
    assert head is not None
    assert head.call.id == "short"


def test_in_bypass_only_regulators_that_protect_memory_act() -> None:
    core = core_with(regulators=[Scripted(max_step_tokens=30)], probe=Probe())
    core.bypass = True
    assert core.take_plan(0.0).max_step_tokens == 100


def test_a_bypass_lifts_the_bounds_of_the_operator_until_the_next_switch() -> None:
    core = core_with(policy="edf")
    core.set_controls(max_running=2, max_step_tokens=40)
    core.set_policy(1.0, "fcfs", {}, "an emergency", bypass=True)
    assert core.take_plan(1.0) == StepPlan(max_running=core.limits.max_running, max_step_tokens=100)
    assert (core.state(1.0, kv_usage=0.0).bypass, core.state(1.0, kv_usage=0.0).controls) == (True, Controls())
    core.set_policy(2.0, "edf", {}, "calm again")
    assert core.take_plan(2.0) == StepPlan(max_running=2, max_step_tokens=40)
    assert not core.state(2.0, kv_usage=0.0).bypass


def test_a_switch_that_fails_does_not_change_the_bypass() -> None:
    core = core_with(policy="edf")
    with pytest.raises(policies.UnknownPolicy):
        core.set_policy(1.0, "fastest", {}, "a test", bypass=True)
    assert not core.bypass


def test_the_call_with_the_most_work_left_now_yields_first() -> None:
    """The estimate at arrival does not count: a long call that is almost done stays."""
    probe = Probe(long=149, short=51)
    core = core_with(policy="sjf", probe=probe)
    for name, predicted in (("long", 100), ("short", 20)):
        core.queues[0].push(core.on_arrival(0.0, replace(call(name), output_predicted=predicted)))
        core.queues[0].pop(0.0)
    step(core, 1.0, {"long": Computed(50, 99), "short": Computed(50, 1)})
    assert core.victims(1.0) == ["short", "long"]


def test_a_call_is_not_preempted_twice_without_progress_while_another_can_yield() -> None:
    core = core_with("a", "b", policy="sjf", probe=Probe(a=50, b=50))
    core.queues[0].pop(0.0)
    core.queues[0].pop(0.0)
    step(core, 1.0, {"a": Computed(50, 1), "b": Computed(50, 5)})
    assert core.victims(1.0) == ["a", "b"]
    core.queues[0].push_preempted(core.on_preemption(1.0, CallId("a"), output_tokens=1))
    core.queues[0].pop(1.0)
    assert core.victims(1.0) == ["b", "a"]
    step(core, 2.0, {"a": Computed(51, 1)})
    assert core.victims(2.0) == ["a", "b"]


def test_a_preempted_call_keeps_what_the_prefix_cache_holds() -> None:
    probe = Probe(a=54)
    probe.cached = 32
    core = core_with("a", probe=probe)
    core.queues[0].pop(0.0)
    again = core.on_preemption(1.0, CallId("a"), output_tokens=4)
    assert again.service_s == pytest.approx(COST.prefill_seconds(54, 32) + COST.decode_seconds(54, 6))


def test_a_regulator_cannot_widen_the_bounds_of_the_operator() -> None:
    core = core_with(regulators=[Scripted(max_running=4, max_step_tokens=100)])
    core.set_controls(max_running=2, max_step_tokens=20)
    plan = step(core, 1.0, {})
    assert (plan.max_running, plan.max_step_tokens) == (2, 20)


def test_no_regulator_runs_unless_a_setting_names_it() -> None:
    assert regulators.create([]) == []
    with pytest.raises(regulators.UnknownRegulator, match="unknown regulator 'magic'; known are"):
        regulators.create(["magic"])


def test_the_order_of_the_names_does_not_matter() -> None:
    names = list(regulators.REGULATORS)
    forwards, backwards = regulators.create(names), regulators.create([*reversed(names), "fence"])
    assert [type(each) for each in forwards] == [type(each) for each in backwards]


WITHOUT_CHUNKS = EngineLimits(max_running=4, max_step_tokens=4096, start_tokens=2048)


def test_without_chunked_prefill_a_token_bound_leaves_room_for_the_longest_prompt() -> None:
    controls = core_with(limits=WITHOUT_CHUNKS).set_controls(max_running=2, max_step_tokens=64)
    assert controls.max_step_tokens == 2049, "one call decodes, and the longest prompt still fits"


def test_a_token_bound_leaves_each_sequence_its_drafts() -> None:
    drafting = EngineLimits(max_running=4, max_step_tokens=100, tokens_per_sequence=6, start_tokens=6)
    assert core_with(limits=drafting).set_controls(max_running=3, max_step_tokens=1).max_step_tokens == 18


@given(
    st.builds(
        EngineLimits,
        max_running=st.integers(1, 64),
        max_step_tokens=st.integers(64, 4096),
        tokens_per_sequence=st.integers(1, 5),
        start_tokens=st.integers(1, 4096),
    ),
    st.builds(
        StepPlan,
        max_running=st.integers(-5, 100),
        max_step_tokens=st.integers(-5, 5000),
        max_starts=st.none() | st.integers(-3, 3),
        preempt=st.lists(st.uuids().map(lambda value: CallId(str(value))), max_size=3).map(tuple),
        paused=st.frozensets(st.uuids().map(lambda value: CallId(str(value))), max_size=9),
    ),
    st.integers(0, 64),
)
def test_no_plan_stalls_an_engine_or_exceeds_its_limits(limits: EngineLimits, plan: StepPlan, running: int) -> None:
    made = bounds.safe(plan, limits, running=running)
    assert 1 <= made.max_running <= limits.max_running
    assert made.max_step_tokens <= limits.max_step_tokens
    sequences = max(made.max_running, running)
    needed = max(
        sequences * limits.tokens_per_sequence,
        (sequences - 1) * limits.tokens_per_sequence + limits.start_tokens,
    )
    assert made.max_step_tokens >= min(needed, limits.max_step_tokens)
    if running <= len(plan.preempt) + len(made.paused):
        assert made.max_starts is None or made.max_starts >= 1
    assert not made.paused or len(made.paused) + len(plan.preempt) < running


def test_a_bound_that_running_calls_have_raised_falls_as_they_end() -> None:
    core = core_with(*"abcd")
    for _ in range(4):
        core.queues[0].pop(0.0)
    assert core.set_controls(max_running=1, max_step_tokens=1).max_step_tokens == 4
    step(core, 1.0, {name: Computed(50, 1) for name in "abcd"}, a=True, b=True, c=True)
    assert core.state(1.0, kv_usage=0.0).controls.max_step_tokens == 1
    assert core.take_plan(1.0).max_step_tokens == 1
