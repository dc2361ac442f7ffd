"""A fault in policy code never ends the engine: each request finishes, and the log has the fault once."""

import logging

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from driven_scheduler import TIGHT, Driven
from vllm.v1.request import RequestStatus

from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler
from tidegate_policy import policies
from tidegate_policy.engine.regulators import Regulator
from tidegate_policy.engine.step import StepPlan

pytestmark = pytest.mark.vllm

HOOKS = ("lane", "key", "rank", "on_arrival", "on_start", "on_tokens", "on_preemption", "on_end")
TURNS = ("next_lane", "take", "copy")
ANSWERS = {
    "lane": (None, "fast", 1.5),
    "key": (None, 7, (float("nan"),), ("a",), [1.0], (None,)),
    "rank": (None, (float("nan"),)),
    "on_arrival": (3, [[]]),
    "on_tokens": (object(),),
}
"""Answers of hooks that cannot be used."""


class Faulty(policies.StaticPolicy):
    """The last call goes first. One hook raises, or gives a bad answer, in calls `first` to `last`."""

    name = "faulty"
    keys_change = True
    hook = ""
    answer: object = None
    first, last = 0, 10**9
    calls = 0

    def __init__(self, **parameters: float) -> None:
        super().__init__(**parameters)
        type(self).calls = 0
        self.turns = FaultyTurns()

    def key(self, item):
        return self.tried("key", (-item.call.arrived_at_s,))

    def lane(self, item):
        return self.tried("lane", len(item.call.id) % 2)

    def rank(self, item):
        return self.tried("rank", (item.call.arrived_at_s,))

    @classmethod
    def tried(cls, hook, good):
        if hook != cls.hook:
            return good
        cls.calls += 1
        if not cls.first <= cls.calls <= cls.last:
            return good
        if cls.answer is not None:
            return cls.answer
        raise RuntimeError(f"a fault in {hook}")


class FaultyTurns:
    def next_lane(self, lanes):
        return Faulty.tried("next_lane", max(lanes))

    def take(self, lane, lanes):
        Faulty.tried("take", None)

    def copy(self):
        return Faulty.tried("copy", self)


for hook in HOOKS[3:]:
    setattr(Faulty, hook, lambda self, *facts, hook=hook: self.tried(hook, ()))


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setitem(policies.POLICIES, "faulty", Faulty)

    def configured(hook, *, first=1, last=10**9, answer=None):
        for name, value in {"hook": hook, "first": first, "last": last, "answer": answer}.items():
            monkeypatch.setattr(Faulty, name, value)
        return Faulty

    return configured


def served(driven, names):
    """Serves calls with arrivals, preemptions and an abort in between; the names that left."""
    for index, name in enumerate(names):
        driven.add(name, prompt=60 + 10 * index, output=40)
        if index % 3 == 2:
            driven.step()
            driven.scheduler.state()
    driven.scheduler.finish_requests(names[1], RequestStatus.FINISHED_ABORTED)
    for _ in range(3000):
        if not driven.scheduler.has_requests():
            break
        driven.step()
    state = driven.scheduler.state()
    assert (state.running, state.waiting, state.waiting_ids, state.kv_usage) == (0, 0, (), 0.0)
    assert not driven.scheduler.requests
    assert not driven.scheduler._core.policy._keyless
    return driven.scheduler._core.preemptions


NAMES = ["a", "bb", "c", "dd", "e", "ff", "g", "hh", "i", "jj"]


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
@pytest.mark.parametrize("hook", [*HOOKS, *TURNS])
def test_a_hook_that_always_raises_costs_no_request(hook, scheduler, faulty, caplog):
    faulty(hook)
    driven = Driven(TIGHT, policy="faulty", scheduler=scheduler)
    with caplog.at_level(logging.ERROR, logger="vllm.tidegate"):
        preemptions = served(driven, NAMES)
    assert preemptions
    (record,) = [record for record in caplog.records if record.name == "vllm.tidegate"]
    assert hook in record.getMessage()
    assert record.exc_info[1].args == (f"a fault in {hook}",)
    assert sum(driven.scheduler._core.failures.counts.values()) >= 1


@pytest.mark.parametrize("hook", [*HOOKS, *TURNS])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_hook_that_raises_for_a_while_costs_no_request(hook, first, faulty):
    faulty(hook, first=first, last=first + 1)
    served(Driven(TIGHT, policy="faulty"), NAMES)


@pytest.mark.parametrize(
    ("hook", "answer"), [(hook, answer) for hook, answers in ANSWERS.items() for answer in answers]
)
def test_an_answer_that_cannot_be_used_costs_no_request(hook, answer, faulty):
    faulty(hook, answer=answer)
    driven = Driven(TIGHT, policy="faulty")
    served(driven, NAMES)
    assert driven.scheduler._core.failures.counts


@pytest.mark.parametrize("hook", [*HOOKS, *TURNS])
def test_a_switch_to_a_policy_that_raises_costs_no_request_and_can_be_undone(hook, faulty):
    faulty(hook)
    driven = Driven(TIGHT, policy="sjf")
    for index, name in enumerate(NAMES):
        driven.add(name, prompt=60, output=20 + index)
    driven.step()
    assert driven.scheduler.set_policy("faulty", "").reordered == driven.scheduler.state().waiting
    for _ in range(20):
        driven.step()
    driven.scheduler.set_policy("urgency", "back")
    before = dict(driven.scheduler._core.failures.counts)
    driven.starts()
    assert not driven.scheduler.requests
    assert driven.scheduler._core.failures.counts == before, "the policy that replaced it has no fault"


def test_while_a_key_is_missing_calls_start_in_the_order_of_their_arrival(faulty):
    faulty("key", first=3, last=3)
    driven = Driven(policy="faulty")
    driven.scheduler.set_controls(max_running=1, max_step_tokens=None)
    for name in ("a", "c", "e", "g"):
        driven.clock.now_s += 1
        driven.add(name, output=1)
    assert driven.scheduler.state().waiting_ids == ("a", "c", "e", "g"), "the third call has no key"
    assert driven.step() == ["g"], "the step asks for the key again, and the policy decides"
    assert driven.scheduler.state().waiting_ids == ("e", "c", "a")


LIMITS = {"max_running": 4, "max_step_tokens": 64}
PLANS = (
    7,
    StepPlan(**LIMITS | {"max_running": None}),
    StepPlan(**LIMITS | {"max_step_tokens": 100.5}),
    StepPlan(**LIMITS | {"max_step_tokens": float("nan")}),
    StepPlan(**LIMITS, max_starts=True),
    StepPlan(**LIMITS, preempt=None),
    StepPlan(**LIMITS, preempt=(None,)),
    StepPlan(**LIMITS, paused=["a"]),
)
"""Answers of a regulator that are no plan."""


class FaultyRegulator(Regulator):
    """Raises in the method that is named, or plans nonsense."""

    SAFETY = False

    def __init__(self, method, answer=None):
        self._method, self._answer = method, answer

    def observe(self, facts):
        if self._method == "observe":
            raise RuntimeError("a fault in observe")

    def shape(self, engine, plan):
        if self._method == "shape":
            raise RuntimeError("a fault in shape")
        return self._answer if self._method == "answer" else plan


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
@pytest.mark.parametrize(
    "regulator",
    [
        FaultyRegulator("shape"),
        FaultyRegulator("observe"),
        *[FaultyRegulator("answer", answer) for answer in PLANS],
    ],
)
def test_a_regulator_that_raises_changes_no_plan_and_is_reported_once(regulator, scheduler, caplog):
    driven = Driven(TIGHT, regulators=[regulator], scheduler=scheduler)
    with caplog.at_level(logging.ERROR, logger="vllm.tidegate"):
        served(driven, NAMES)
    (record,) = [record for record in caplog.records if record.name == "vllm.tidegate"]
    assert "FaultyRegulator" in record.getMessage()
    assert record.exc_info


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_hostile_labels_cost_no_request(policy, scheduler):
    driven = Driven(TIGHT, policy=policy, scheduler=scheduler)
    hostile = [
        {"urgency": 0}, {"urgency": -9}, {"urgency": float("nan")}, {"budget_ms": -(10**18)}, {"budget_ms": "9" * 10**6},
        {"relquery": "g", "relquery_size": 1_000_000}, {"relquery": "x" * 10**6}, {"relquery": {"a": [1]}},
        {"session": "s", "tool": "t", "tool_ms": 10**15}, {"session": "s", "tool_return": 10_485_760},
        {"weight": 0}, {"weight": float("inf")}, {"weight": 1e-300}, {"out_pred": 0}, {"out_upper": -1}, {"tenant": []},
        {"left_ms": -5}, {"magic": 1}, {"deadline_ms": "now"}, {"ttft_ms": float("-inf"), "tpot_ms": -1},
    ]  # fmt: skip
    for index, labels in enumerate(hostile):
        driven.add(f"call{index}", prompt=40, output=9, **labels)
    driven.starts()
    assert not driven.scheduler.requests
    assert driven.scheduler._core.failures.counts == {}
