"""How an engine computes the prompts of a tenant that floods the pool: in small parts, behind the prompts of others."""

from collections.abc import Iterable, Iterator, Mapping

import pytest

from tidegate_policy.cost import CostModel
from tidegate_policy.engine import engine_core, yielding_prompts
from tidegate_policy.engine.step import EngineLimits, StepPlan
from tidegate_policy.model import Call, CallId
from tidegate_policy.policies import Computed, QueuedRequest

COST = CostModel(step_s=0.02, prefill_s=1e-4, max_step_tokens=2048)
LIMITS = EngineLimits(max_running=256, max_step_tokens=2048)
CHUNK = round(yielding_prompts.CHUNK_STEPS * COST.step_s / COST.prefill_s)
UNBOUNDED = StepPlan(max_running=256, max_step_tokens=2048)


class Engine:
    """An engine core whose calls wait, compute their prompts, or decode, as a test says."""

    def __init__(self) -> None:
        self.kv: dict[CallId, int] = {}
        self.reserved = 0
        self.core = engine_core.EngineCore(0.0, cost=COST, limits=LIMITS, policy="fcfs", probe=self)

    def kv_tokens(self, call_id: CallId) -> int:
        return self.kv[call_id]

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        return self.kv[call_id]

    def free_kv_tokens(self) -> int:
        return LIMITS.kv_tokens

    def shared_tokens(self, call_id: CallId) -> int:
        return 0

    def reserved_places(self) -> int:
        return self.reserved

    def cached_tokens(self, call_id: CallId) -> int:
        return 0

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        return iter(waiting)

    def waits(self, name: str, *, yields: bool = False, tokens: int = 1000, due_at_s: float | None = None) -> None:
        call = Call(
            id=CallId(name),
            arrived_at_s=0.0,
            prompt_tokens=tokens,
            output_predicted=10,
            yields=yields,
            due_at_s=due_at_s,
        )
        self.core.queues[0].push(self.core.on_arrival(0.0, call))

    def computes(self, name: str, *, yields: bool = False) -> None:
        """A call whose prompt is half computed."""
        self.waits(name, yields=yields)
        self.core.queues[0].start(0.0, CallId(name))
        self.kv[CallId(name)] = 500

    def decodes(self, name: str) -> None:
        self.computes(name)
        self.kv[CallId(name)] = 1000
        self.step({name: Computed(1000, 1)})

    def ends(self, name: str) -> None:
        self.core.on_end(1.0, CallId(name), finished=True)

    def step(self, computed: Mapping[str, Computed]) -> None:
        tokens = {CallId(name): count for name, count in computed.items()}
        self.core.on_step(1.0, step_s=0.02, computed=tokens, ended={})

    def plan(self) -> StepPlan:
        return self.core.take_plan(1.0)


def test_an_engine_without_such_prompts_keeps_its_plan() -> None:
    engine = Engine()
    engine.decodes("a")
    engine.computes("b")
    engine.waits("c")
    assert engine.plan() == UNBOUNDED


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_computes_few_tokens_of_such_a_prompt(waits: bool) -> None:
    engine = Engine()
    engine.decodes("honest")
    if waits:
        engine.waits("flood", yields=True)
    else:
        engine.computes("flood", yields=True)
    plan = engine.plan()
    assert plan.max_step_tokens == CHUNK + 1, "the chunk and one decode"
    assert not plan.paused
    engine.ends("flood")
    assert engine.plan() == UNBOUNDED


@pytest.mark.parametrize("waits", [True, False])
def test_beside_the_prompt_of_another_call_it_is_paused_in_every_second_step(waits: bool) -> None:
    engine = Engine()
    engine.decodes("other")
    engine.computes("flood", yields=True)
    if waits:
        engine.waits("honest")
    else:
        engine.computes("honest")
    first, second, third = engine.plan(), engine.plan(), engine.plan()
    assert (first.paused, first.max_step_tokens) == ({"flood"}, 2048)
    assert second.paused == frozenset()
    assert second.max_step_tokens < 2048
    assert third == first


@pytest.mark.parametrize("between", ["no such call", "one that waits", "one that decodes", "bypass"])
def test_a_step_without_such_prompts_forgets_the_pause_before_it(between: str) -> None:
    engine = Engine()
    engine.decodes("other")
    engine.waits("honest")
    engine.computes("flood", yields=True)
    assert engine.plan().paused == {"flood"}
    if between == "bypass":
        engine.core.set_policy(1.0, "fcfs", {}, "emergency", bypass=True)
    elif between == "one that decodes":
        engine.kv[CallId("flood")] = 1000
        engine.step({"flood": Computed(1000, 1)})
    else:
        engine.ends("flood")
    if between == "one that waits":
        engine.waits("flood1", yields=True)
    assert not engine.plan().paused
    if between == "bypass":
        engine.core.set_policy(1.0, "fcfs", {}, "over")
    else:
        engine.computes("flood2", yields=True)
    assert engine.plan().paused == {"flood" if between == "bypass" else "flood2"}


def test_such_a_prompt_does_not_start_beside_a_call_that_waits_before_it() -> None:
    engine = Engine()
    engine.decodes("other")
    engine.waits("honest")
    engine.waits("flood", yields=True)
    plan = engine.plan()
    assert (plan.max_starts, plan.max_step_tokens) == (1, 2048)


def test_such_a_prompt_takes_no_tokens_from_a_prompt_that_is_partly_computed() -> None:
    engine = Engine()
    engine.computes("honest")
    engine.waits("flood", yields=True)
    assert engine.plan().max_step_tokens == 500 + CHUNK


def test_beside_a_prompt_that_runs_alone_another_call_starts_at_once() -> None:
    engine = Engine()
    engine.computes("flood", yields=True)
    engine.waits("honest")
    for _ in range(2):
        plan = engine.plan()
        assert not plan.paused, "an engine stops if all that runs pauses and no call starts"
        assert (plan.max_step_tokens, plan.max_call_tokens) == (LIMITS.max_step_tokens, CHUNK)


def test_an_engine_in_bypass_treats_all_prompts_alike() -> None:
    engine = Engine()
    engine.computes("flood", yields=True)
    engine.core.set_policy(1.0, "fcfs", {}, "emergency", bypass=True)
    assert engine.plan() == UNBOUNDED


@pytest.mark.parametrize("policy", ["edf", "urgency", "llf", "sjf", "two-lane"])
def test_such_a_call_starts_after_all_others_of_its_lane_although_it_is_late(policy: str) -> None:
    engine = Engine()
    engine.waits("flood", yields=True, tokens=10, due_at_s=-5.0)
    engine.core.set_policy(0.0, policy, {}, "test")
    engine.waits("honest", tokens=10, due_at_s=5.0)
    engine.waits("late flood", yields=True, tokens=10, due_at_s=-9.0)
    assert next(item.call.id for item in engine.core.queues[0]) == "honest"
    engine.core.set_policy(0.0, "fcfs", {}, "test")
    assert [item.call.id for item in engine.core.queues[0]] == ["honest", "flood", "late flood"]


@pytest.mark.parametrize(
    ("tokens", "starts"), [(1000, 1), (CHUNK, 1), (CHUNK // 4, 4), (10, yielding_prompts.MOST_STARTS)]
)
def test_as_many_such_prompts_start_in_a_step_as_it_computes(tokens: int, starts: int) -> None:
    engine = Engine()
    engine.decodes("honest")
    for number in range(50):
        engine.waits(f"flood {number}", yields=True, tokens=tokens)
    plan = engine.plan()
    assert plan.max_running == 1 + min(starts, CHUNK // tokens or 1)
    assert plan.max_step_tokens == CHUNK + 1


@pytest.mark.parametrize("decodes", [0, 1])
def test_such_a_prompt_starts_beside_a_session_that_keeps_a_place(decodes: int) -> None:
    engine = Engine()
    engine.reserved = 1
    for number in range(decodes):
        engine.decodes(f"honest-{number}")
    engine.waits("flood", yields=True)
    assert engine.plan().max_running == decodes + engine.reserved + 1


def test_an_operators_bound_leaves_a_place_beside_the_sessions_that_keep_theirs() -> None:
    engine = Engine()
    engine.reserved = 3
    engine.core.set_controls(max_running=2, max_step_tokens=None)
    assert engine.plan().max_running == 4
