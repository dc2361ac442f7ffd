"""The memory that all tenants share: its bound, who gives way, and that quiet tenants of each user of it lose nothing."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy.admit import workflow_gate
from tidegate_policy.model import CallId, WorkflowId
from tidegate_policy.predict import text_density, tool_use, workflow_history
from tidegate_policy.predict.remaining_work import RemainingWork
from tidegate_policy.predict.tenant_median import TenantMedian
from tidegate_policy.tenant_memory import TenantMemory

MANY = 12_000
"""Names that one tenant brings: more than any of these memories holds."""

OBSERVED = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=120)


@given(st.integers(1, 12), OBSERVED)
def test_the_largest_tenant_gives_way_with_its_oldest_entry(most: int, observed: list[tuple[str, int, bool]]) -> None:
    memory: TenantMemory[int, int] = TenantMemory(most)
    model: dict[str, dict[int, int]] = {}
    for value, (tenant, key, remembered) in enumerate(observed):
        entries = model.setdefault(tenant, {})
        if not remembered:
            assert memory.pop(tenant, key) == entries.pop(key, None)
            continue
        gone = memory.put(tenant, key, value)
        entries.pop(key, None)
        entries[key] = value
        largest = max(map(len, model.values()))
        assert (gone is None) == (sum(map(len, model.values())) <= most)
        if gone is not None:
            assert len(model[gone[0]]) == largest
            assert gone[1:] == next(iter(model[gone[0]].items()))
            del model[gone[0]][gone[1]]
        assert len(memory) == len(memory.keys()) == sum(map(len, model.values()))
        for name, known in model.items():
            assert {k: memory.get(name, k) for k in range(10) if memory.get(name, k) is not None} == known


def test_a_tenant_with_less_than_its_equal_part_loses_nothing() -> None:
    memory: TenantMemory[int, int] = TenantMemory(30)
    for key in range(10):
        memory.put("quiet", key, key)
    for key in range(1000):
        memory.put(f"loud {key % 2}", key, key)
    assert [memory.get("quiet", key) for key in range(10)] == list(range(10))


def test_one_tenant_may_use_all_of_it_and_equal_tenants_take_turns() -> None:
    memory: TenantMemory[int, int] = TenantMemory(30)
    for key in range(100):
        memory.put("alone", key, key)
    assert memory.keys() == [("alone", key) for key in range(70, 100)]
    for tenant in range(100):
        memory.put(f"t{tenant}", 0, 0)
    assert sorted(memory.keys()) == sorted((f"t{tenant}", 0) for tenant in range(70, 100))


@given(st.lists(st.floats(0, 100), max_size=9), st.floats(0, 100))
def test_the_middle_is_a_median_and_the_usual_value_decides_between_two(values: list[float], usual: float) -> None:
    known = TenantMedian(usual)
    for value in values:
        known.change(None, value)
    least, most = (middle([usual, *values]) for middle in (statistics.median_low, statistics.median_high))
    assert known.middle == (least if abs(least - usual) < abs(most - usual) else most)
    for value in values:
        known.change(value, usual)
    assert known.middle == usual
    for _ in values:
        known.change(usual, None)
    assert len(known) == 1


# The users of the memory: what is known of `quiet` stays while `loud` brings many names.


def test_the_tool_after_a_call() -> None:
    tools, kind = tool_use.ToolUse(), ("quiet", "", "agent", "m")
    for _ in range(5):
        tools.on_answer(kind, tool_use.NO_TOOL, "search")
    for index in range(MANY):
        tools.on_answer(("loud", "", str(index), "m"), tool_use.NO_TOOL, "read")
    assert tools.predict(kind, "quiet", tool_use.NO_TOOL).tool == "search"


def test_the_characters_of_a_token() -> None:
    density = text_density.TextDensity()
    for _ in range(50):
        density.observe("quiet", "m", 2.0)
    for index in range(MANY):
        density.observe("loud", str(index), 8.0)
    assert density.characters_per_token("quiet", "m") == pytest.approx(2.0, rel=0.1)


def test_the_work_behind_a_stage_and_the_stages_of_a_template() -> None:
    work = RemainingWork()
    history = workflow_history.WorkflowHistory(work, lambda tenant, path_s, demand_s: None)

    def run(tenant: str, template: str, stages: list[str]) -> None:
        workflow = WorkflowId(f"{tenant} {template}")
        for index, stage in enumerate(stages):
            history.on_call(index, workflow, CallId(stage), stage, tenant=tenant, template=template)
            history.on_end(index + 1.0, workflow, CallId(stage), 1.0)
        history.on_workflow_end(len(stages), workflow, ok=True)

    run("quiet", "text2sql", ["plan", "write"])
    for index in range(600):
        run("loud", str(index), [f"stage {index} {number}" for number in range(10)])
    assert work.predict(("quiet", "text2sql", "plan")) == 1.0
    assert list(history.stages("quiet", "text2sql")) == ["plan", "write"]
    assert len(history.templates) == workflow_history.MAX_TEMPLATES
    for index in range(20):
        run("loud", "one template", [f"stage {index} {number}" for number in range(100)])
    assert len(history.stages("loud", "one template")) == workflow_history.MAX_STAGES


def test_running_workflows() -> None:
    work = RemainingWork()
    history = workflow_history.WorkflowHistory(work, lambda tenant, path_s, demand_s: None)
    history.on_call(0.0, WorkflowId("w"), CallId("a"), "plan", tenant="quiet")
    history.on_end(1.0, WorkflowId("w"), CallId("a"), 1.0)
    for index in range(MANY):
        history.on_call(1.0, WorkflowId(str(index)), CallId("b"), "plan", tenant="loud")
    assert len(history._running) == workflow_history.MAX_WORKFLOWS
    history.on_workflow_end(2.0, WorkflowId("w"), ok=True)
    assert work.predict(("quiet", "", "plan")) == 0.0


def test_started_workflows() -> None:
    gate = workflow_gate.WorkflowGate(bounded=True)
    for _ in range(workflow_gate.FIRST_WORKFLOWS):
        gate.observe("loud", 1.0, 1000.0)
    gate.enter(0.0, WorkflowId("w"), "quiet", 1.0)
    gate.leave(1.0, WorkflowId("w"))
    for index in range(MANY):
        gate.enter(1.0, WorkflowId(str(index)), "loud", 1.0)
        gate.leave(1.0, WorkflowId(str(index)))
    assert len(gate._idle) == workflow_gate.REMEMBERED
    gate.enter(1.0, WorkflowId("another"), "quiet", 1.0)
    assert gate.must_wait(1.0, WorkflowId("new"), "quiet"), "its share is taken"
    assert not gate.must_wait(1.0, WorkflowId("w"), "quiet"), "it has started"


def test_random_workflows_are_remembered_as_often_as_they_are_idle() -> None:
    gate, rng, busy = workflow_gate.WorkflowGate(bounded=True), random.Random(1), set[int]()
    for step in range(2000):
        number = rng.randrange(50)
        name = WorkflowId(str(number))
        if number in busy:
            gate.leave(step, name)
            busy.remove(number)
        elif rng.random() < 0.2:
            gate.over(name)
        else:
            gate.enter(step, name, f"t{number % 3}", 1.0)
            busy.add(number)
        assert sorted(gate._remembered.keys()) == sorted((tenant, each) for each, tenant in gate._idle.items())
