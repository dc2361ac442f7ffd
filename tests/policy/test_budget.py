"""A workflow's deadline, shared over its stages (HexGen eq 5)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import budget
from tidegate_policy.model import StageState, Workflow, WorkflowId


def workflow(*stages: StageState, deadline_s: float = 100.0) -> Workflow:
    return Workflow(id=WorkflowId("w"), arrival_s=0.0, deadline_s=deadline_s, stages=stages)


def stage(name: str, mean_s: float, *after: str, done: bool = False) -> StageState:
    return StageState(name=name, mean_s=mean_s, after=after, done=done)


@st.composite
def dags(draw: st.DrawFn) -> Workflow:
    count = draw(st.integers(1, 8))
    stages = []
    for index in range(count):
        before = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        cost = draw(st.floats(0.001, 100))
        stages.append(stage(f"s{index}", cost, *(f"s{i}" for i in sorted(before)), done=draw(st.booleans())))
    return workflow(*stages, deadline_s=draw(st.floats(-10, 1000)))


def paths(flow: Workflow) -> list[list[str]]:
    after = {s.name: s.after for s in flow.stages}

    def to(name: str) -> list[list[str]]:
        return [[*path, name] for before in after[name] for path in to(before)] or [[name]]

    return [path for name in after for path in to(name)]


def test_a_chain_shares_in_proportion_to_cost() -> None:
    flow = workflow(stage("a", 1.0), stage("b", 3.0, "a"))
    assert budget.plan(0.0, flow) == {"a": 25.0, "b": 75.0}
    assert budget.stage_due_s(0.0, flow, "a") == 25.0


def test_parallel_stages_share_and_do_not_add_up() -> None:
    flow = workflow(stage("a", 1.0), stage("b", 3.0, "a"), stage("c", 1.0, "a"))
    plan = budget.plan(0.0, flow)
    assert plan["a"] == 25.0
    assert plan["b"] == 75.0
    assert plan["c"] == 50.0


def test_time_lost_is_taken_from_what_follows() -> None:
    flow = workflow(stage("a", 1.0, done=True), stage("b", 1.0, "a"), stage("c", 1.0, "b"))
    assert budget.stage_due_s(60.0, flow, "b") == 80.0


def test_the_last_stage_may_use_all_that_is_left() -> None:
    assert budget.stage_due_s(40.0, workflow(stage("a", 5.0)), "a") == 100.0


def test_an_undeclared_stage_may_use_all_that_is_left() -> None:
    assert budget.stage_due_s(40.0, workflow(stage("a", 5.0)), "surprise") == 100.0


def test_after_the_deadline_the_budget_is_nothing_and_never_negative() -> None:
    assert budget.stage_due_s(120.0, workflow(stage("a", 5.0)), "a") == 120.0


@given(dags(), st.floats(0, 500))
def test_budgets_along_any_path_never_sum_past_the_deadline(flow: Workflow, now: float) -> None:
    plan = budget.plan(now, flow)
    left_s = max(flow.deadline_s - now, 0.0)
    for path in paths(flow):
        assert sum(plan.get(name, 0.0) for name in path) <= left_s * (1 + 1e-9) + 1e-9


@given(dags(), st.floats(0, 500))
def test_resharing_after_each_stage_keeps_the_deadline_when_stages_keep_their_budgets(
    flow: Workflow, now: float
) -> None:
    flow = replace(flow, stages=tuple(replace(s, done=False) for s in flow.stages), deadline_s=now + 100.0)
    finish: dict[str, float] = {}
    for each in flow.stages:
        start = max((finish[name] for name in each.after), default=now)
        finish[each.name] = budget.stage_due_s(start, flow, each.name)
    assert max(finish.values()) <= flow.deadline_s + 1e-6


@given(dags(), dags(), st.floats(0, 500))
def test_no_workflow_changes_anothers_budgets(one: Workflow, other: Workflow, now: float) -> None:
    before = budget.plan(now, one)
    for each in other.stages:
        budget.stage_due_s(now, other, each.name)
    assert budget.plan(now, one) == before


def test_a_cycle_is_named() -> None:
    with pytest.raises(budget.CyclicStages, match=r"stage '.' waits for itself"):
        budget.declared((stage("a", 1.0, "b"), stage("b", 1.0, "a")))


def test_an_undeclared_predecessor_is_named() -> None:
    with pytest.raises(ValueError, match="stage 'b' comes after 'x', which is not declared"):
        budget.declared((stage("a", 1.0), stage("b", 1.0, "x")))


def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    stages = [stage("s0", 1.0)] + [stage(f"s{i}", 1.0, f"s{i - 1}") for i in range(1, 5000)]
    assert budget.remaining_after_s(workflow(*stages), "s0") == 4999.0
