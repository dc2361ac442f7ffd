"""The regulators that decide about memory and places: `slot-preemption`, `fence` and `memory-limit`."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from regulated_engine import COST, FULL, LIMITS, World, call, shaped

from tidegate_policy.engine import regulators, snapshot
from tidegate_policy.engine.step import EndedCall, StepFacts
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed
from tidegate_policy.predict.conformal_bound import ConformalBound

# slot preemption


def test_an_urgent_call_takes_the_place_of_the_call_that_ranks_last() -> None:
    world = World("priority", limits=replace(LIMITS, max_running=2))
    world.runs("low", done=3, urgency=4)
    world.runs("high", done=3, urgency=0)
    world.waits("urgent", urgency=0)
    plan = shaped("slot-preemption", world.engine(), replace(FULL, max_running=2))
    assert plan.preempt == ("low",)


def test_an_urgent_call_takes_the_memory_of_as_many_calls_as_it_needs() -> None:
    world = World("priority")
    world.runs("low0", prompt=4000, done=3, urgency=4)
    world.runs("low1", prompt=4000, done=3, urgency=4)
    world.waits("urgent", prompt=5000, urgency=0)
    assert (
        set(shaped("slot-preemption", world.engine()).preempt) == {"low0"}
        or len(shaped("slot-preemption", world.engine()).preempt) == 1
    )
    world.free = 0
    assert len(shaped("slot-preemption", world.engine()).preempt) == 2


def test_a_shorter_call_preempts_only_if_it_pays_for_the_recomputation() -> None:
    places = replace(LIMITS, max_running=1)
    world = World("sjf", limits=places, cost=replace(COST, prefill_s=0.01))
    world.runs("long", prompt=900, output=300, done=3)
    world.waits("short", prompt=10, output=10)
    plan = replace(FULL, max_running=1)
    assert shaped("slot-preemption", world.engine(), plan).preempt == ()
    cheap = World("sjf", limits=places)
    cheap.runs("long", prompt=900, output=300, done=3)
    cheap.waits("short", prompt=10, output=10)
    assert shaped("slot-preemption", cheap.engine(), plan).preempt == ("long",)


def test_a_call_without_progress_since_its_preemption_keeps_its_place() -> None:
    world = World("priority", limits=replace(LIMITS, max_running=1))
    world.runs("low", done=3, urgency=4)
    world.core.on_preemption(0.5, CallId("low"), output_tokens=3)
    world.waits("urgent", urgency=0)
    assert shaped("slot-preemption", world.engine(), replace(FULL, max_running=1)).preempt == ()


def test_no_call_yields_to_a_call_that_cannot_start() -> None:
    world = World("priority", limits=replace(LIMITS, max_running=1))
    world.runs("low", done=3, urgency=4)
    world.waits_blocked("grammar", urgency=0)
    plan = replace(FULL, max_running=1)
    assert shaped("slot-preemption", world.engine(), plan) == plan
    world.waits("next", urgency=1)
    assert shaped("slot-preemption", world.engine(), plan).preempt == ("low",), "the call behind it can start"
    world.blocked.clear()
    head = world.engine().head
    assert head is not None
    assert head.call.id == "grammar"


def test_memory_that_calls_share_does_not_count_as_freed() -> None:
    world = World("priority")
    for number in range(8):
        world.runs(f"low{number}", prompt=624, done=1, urgency=4)
        world.shared[CallId(f"low{number}")] = 608
    world.free = 0
    world.waits("urgent", prompt=32, urgency=0)
    plan = replace(FULL, max_running=16)
    assert len(shaped("slot-preemption", world.engine(), plan).preempt) == 3, "each frees 16 of the 32 + 16 tokens"
    world.waits("too long", prompt=400, urgency=0)
    world.core.on_end(0.0, CallId("urgent"), finished=False)
    world.core.queues[0].remove(CallId("urgent"))
    assert shaped("slot-preemption", world.engine(), plan) == plan, "all eight free 128 tokens, so none yields in vain"


@pytest.mark.parametrize(("prefill_s", "victims"), [(1e-4, 2), (1.4e-3, 0)])
def test_an_exchange_pays_for_the_recomputation_of_all_victims(prefill_s: float, victims: int) -> None:
    """At 1.4 ms for a token the waiting call takes 1.6 s, each recomputation 1.4 s; each running call has 3.6 s left."""
    world = World("sjf", cost=replace(COST, prefill_s=prefill_s))
    for number in range(2):
        world.runs(f"long{number}", prompt=1000, output=180, done=3)
    world.free = 0
    world.waits("short", prompt=1100, output=5)
    assert len(shaped("slot-preemption", world.engine()).preempt) == victims


# fence and memory limit


def test_the_fence_charges_no_call_that_cannot_start() -> None:
    world = World("fcfs", limits=replace(LIMITS, kv_tokens=2000))
    world.runs("running", prompt=300, output=100, done=1)
    world.waits_blocked("grammar", prompt=1900)
    for name in "abc":
        world.waits(name, prompt=100, output=150)
    assert shaped("fence", world.engine()).max_starts == 3


def test_a_step_passes_few_of_many_calls_that_cannot_start() -> None:
    """A call behind those that were looked at may start if a call of the greatest size fits."""
    world = World("fcfs", limits=replace(LIMITS, kv_tokens=2000))
    world.runs("running", prompt=300, output=100, done=1)
    for number in range(2000):
        world.waits_blocked(f"b{number}", prompt=600)
    world.waits("last", prompt=100)
    for name, regulator in regulators.REGULATORS.items():
        world.looks = 0
        plan = regulator().shape(world.engine(), FULL)
        assert world.looks <= snapshot.MOST_SKIPPED + 1, name
        assert plan.max_starts == (2 if name == "fence" else None), name


def test_the_fence_gives_the_memory_of_a_call_that_yields_to_the_call_that_takes_its_place() -> None:
    world = World("priority", limits=replace(LIMITS, max_running=2, kv_tokens=1000))
    world.runs("high", prompt=300, output=100, done=3, urgency=0)
    world.runs("low", prompt=300, output=100, done=3, urgency=4)
    world.waits("urgent", prompt=300, output=100, urgency=0)
    engine, plan = world.engine(), replace(FULL, max_running=2)
    assert shaped("fence", engine, plan).max_starts == 0
    for regulator in regulators.create(["fence", "slot-preemption"]):
        plan = regulator.shape(engine, plan)
    assert (plan.preempt, plan.max_starts) == (("low",), 1)


def test_no_call_yields_for_a_call_that_the_fence_holds_back() -> None:
    world = World("priority", limits=replace(LIMITS, max_running=2, kv_tokens=1000))
    world.runs("high", prompt=300, output=100, done=3, urgency=0)
    world.runs("low", prompt=300, output=100, done=3, urgency=4)
    world.waits("urgent", prompt=300, output=900, urgency=0)
    engine, plan = world.engine(), replace(FULL, max_running=2)
    for regulator in regulators.create(["slot-preemption", "fence"]):
        plan = regulator.shape(engine, plan)
    assert (plan.preempt, plan.max_starts) == ((), 0)


def test_the_fence_starts_as_many_calls_as_fit_with_their_whole_output() -> None:
    world = World("fcfs", limits=replace(LIMITS, kv_tokens=1000))
    world.runs("running", prompt=300, output=100, done=1)
    for name in "abc":
        world.waits(name, prompt=100, output=150)
    assert shaped("fence", world.engine()).max_starts == 2


def test_the_fence_charges_a_cached_prefix_unless_a_running_call_keeps_it() -> None:
    world = World("fcfs", limits=replace(LIMITS, kv_tokens=1000))
    world.runs("running", prompt=300, output=100, done=1)
    world.waits("a", prompt=600, output=100)
    world.cached["a"] = 500
    assert shaped("fence", world.engine()).max_starts == 0
    world.kept["a"] = 300
    assert shaped("fence", world.engine()).max_starts == 1


def test_the_fence_learns_how_far_outputs_exceed_their_prediction() -> None:
    world = World("fcfs", limits=replace(LIMITS, kv_tokens=1000))
    world.waits("a", prompt=100, output=50)
    world.waits("b", prompt=100, output=50)
    fence = regulators.create(["fence"])[0]
    assert fence.shape(world.engine(), FULL).max_starts == 2
    ended = tuple(EndedCall(call=call(f"e{n}", 100, 50, {}), output_tokens=450, finished=True) for n in range(40))
    fence.observe(StepFacts(now=0.0, step_s=0.02, computed={}, preempted=(), ended=ended))
    assert fence.shape(world.engine(), FULL).max_starts == 1


class History:
    """A world in which calls come, run, yield, change and end, and what a fence was told of it."""

    def __init__(self) -> None:
        self.world = World("fcfs", limits=replace(LIMITS, max_running=16, kv_tokens=1500))
        self.fence = regulators.create(["fence"])[0]
        self.facts: list[StepFacts] = []
        self.done: dict[CallId, int] = {}
        """The output tokens of each running call."""
        self.count = 0

    def waits(self, size: int) -> None:
        self.count += 1
        self.world.waits(f"c{self.count}", prompt=64 + size % 60, output=5 + size % 30, output_upper=size % 50)

    def starts(self, size: int) -> None:
        queue = self.world.core.queues[0]
        if len(queue):
            started = queue.pop(0.0)
            self.done[started.call.id] = self.world.core.service(started.call.id).output_tokens
            self.computes(started.call)

    def computes(self, call: Call) -> None:
        self.world.kv[call.id] = call.prompt_tokens + self.done[call.id]

    def delivers(self, size: int) -> None:
        """A step gives each running call some tokens."""
        computed = {call_id: Computed(0, 1 + size % 3 * (number % 2)) for number, call_id in enumerate(self.done)}
        for call_id, tokens in computed.items():
            self.done[call_id] += tokens.output_tokens
            self.computes(self.world.core.item(call_id).call)
        self.world.core.on_step(0.0, step_s=0.02, computed=computed, ended={})

    def yields(self, size: int) -> None:
        if self.done:
            call_id, output_tokens = self.done.popitem()
            again = self.world.core.on_preemption(0.0, call_id, output_tokens=output_tokens)
            self.world.core.queues[0].push_preempted(again)

    def changes(self, size: int) -> None:
        if self.done:
            call_id = list(self.done)[size % len(self.done)]
            self.world.core.on_update(replace(self.world.core.item(call_id).call, output_predicted=10 + size))

    def ends(self, size: int) -> None:
        if self.done:
            call_id = list(self.done)[size % len(self.done)]
            call, tokens = self.world.core.item(call_id).call, self.done.pop(call_id)
            self.world.core.on_end(0.0, call_id, finished=True)
            ended = EndedCall(call=call, output_tokens=tokens + size, finished=True)
            self.facts.append(StepFacts(now=0.0, step_s=0.02, computed={}, preempted=(), ended=(ended,)))
            self.fence.observe(self.facts[-1])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["waits", "waits", "starts", "delivers", "delivers", "yields", "changes", "ends"]),
            st.integers(0, 100),
        ),
        min_size=10,
        max_size=60,
    )
)
@example([("waits", 0), ("waits", 0), ("waits", 0), ("starts", 0), ("starts", 0), ("delivers", 0), ("ends", 100)])
@settings(max_examples=60, deadline=None)
def test_a_fence_that_follows_a_history_admits_as_one_that_adds_up_all_promises_again(events) -> None:
    history = History()
    plan = replace(FULL, max_running=16)
    for event, size in events:
        getattr(history, event)(size)
        history.world.free = 60  # so little that the promises to the running calls matter
        history.fence.shape(history.world.engine(), plan)
    again = regulators.create(["fence"])[0]
    for facts in history.facts:
        again.observe(facts)
    first = next(iter(history.done), None)
    plans = [plan, plan.at_most(starts=1), replace(plan, preempt=(first,)) if first else plan]
    for free in range(0, 1500, 2):  # one of these is the least with which another call starts
        history.world.free = free
        for each in plans:
            found, expected = (fence.shape(history.world.engine(), each) for fence in (history.fence, again))
            assert found == expected


def test_a_conformal_bound_holds_for_the_promised_share_of_calls() -> None:
    rng = random.Random(5)
    bound = ConformalBound(risk=0.1)
    exceeded = 0
    for _ in range(5000):
        predicted, actual = 100, round(rng.lognormvariate(4.6, 0.6))
        exceeded += actual > bound.upper(500, predicted)
        bound.observe(500, predicted, actual)
    assert 0.07 < exceeded / 5000 < 0.13


@pytest.mark.parametrize(("free", "tokens"), [(10_000, 1000), (600, 600), (0, 250)])
def test_the_memory_limit_follows_free_memory_within_its_band(free: int, tokens: int) -> None:
    world = World()
    world.free = free
    assert shaped("memory-limit", world.engine()).max_step_tokens == tokens
