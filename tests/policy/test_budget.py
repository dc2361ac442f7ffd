"""A workflow's deadline, shared over its stages (HexGen eq 5)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policy import budget
from tidegate_policy.model import StageState, Workflow, WorkflowId


def workflow(*stages: StageState, deadline_at_s: float = 100.0) -> Workflow:
    return Workflow(id=WorkflowId("w"), deadline_at_s=deadline_at_s, stages=stages)


def stage(name: str, mean_s: float, *after: str, done: bool = False, passes: int = 1) -> StageState:
    return StageState(name=name, mean_s=mean_s, after=after, done=done, passes=passes)


def due_at_s(now: float, flow: Workflow, name: str) -> float:
    return budget.of_call(now, flow, name).due_at_s


@st.composite
def dags(draw: st.DrawFn) -> Workflow:
    count = draw(st.integers(1, 8))
    stages = []
    for index in range(count):
        before = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        cost = draw(st.floats(0.001, 100))
        names = (f"s{i}" for i in sorted(before))
        stages.append(stage(f"s{index}", cost, *names, done=draw(st.booleans()), passes=draw(st.integers(1, 3))))
    return workflow(*stages, deadline_at_s=draw(st.floats(-10, 1000)))


def paths(flow: Workflow) -> list[list[str]]:
    after = {s.name: s.after for s in flow.stages}

    def to(name: str) -> list[list[str]]:
        return [[*path, name] for before in after[name] for path in to(before)] or [[name]]

    return [path for name in after for path in to(name)]


def test_a_chain_shares_in_proportion_to_cost() -> None:
    flow = workflow(stage("a", 1.0), stage("b", 3.0, "a"))
    assert budget.of_call(0.0, flow, "a") == budget.Budget(due_at_s=25.0, rest_s=3.0)
    assert budget.of_call(25.0, flow, "b") == budget.Budget(due_at_s=100.0, rest_s=0.0)


def test_parallel_stages_share_and_do_not_add_up() -> None:
    flow = workflow(stage("a", 1.0), stage("b", 3.0, "a"), stage("c", 1.0, "a"))
    assert due_at_s(0.0, flow, "a") == 25.0


def test_the_passes_of_a_loop_add_up() -> None:
    flow = workflow(stage("a", 1.0, passes=3), stage("b", 1.0, "a"))
    assert budget.of_call(0.0, flow, "a") == budget.Budget(due_at_s=25.0, rest_s=3.0)


def test_time_lost_is_taken_from_what_follows() -> None:
    flow = workflow(stage("a", 1.0, done=True), stage("b", 1.0, "a"), stage("c", 1.0, "b"))
    assert due_at_s(60.0, flow, "b") == 80.0


def test_the_last_stage_may_use_all_that_is_left() -> None:
    assert due_at_s(40.0, workflow(stage("a", 5.0)), "a") == 100.0


def test_an_undeclared_stage_may_use_all_that_is_left() -> None:
    assert due_at_s(40.0, workflow(stage("a", 5.0)), "surprise") == 100.0


def test_after_the_deadline_the_budget_is_nothing_and_never_negative() -> None:
    assert due_at_s(120.0, workflow(stage("a", 5.0)), "a") == 120.0


@given(dags(), st.floats(0, 500))
def test_budgets_along_any_path_never_sum_past_the_deadline(flow: Workflow, now: float) -> None:
    """Every call of every pass uses up its budget before the next begins."""
    for path in paths(flow):
        left, instant = {each.name: each for each in flow.stages}, now
        for name in path:
            for passes in range(0 if left[name].done else left[name].passes, 0, -1):
                left[name] = replace(left[name], passes=passes)
                instant = due_at_s(instant, replace(flow, stages=tuple(left.values())), name)
            left[name] = replace(left[name], done=True)
        assert instant <= max(flow.deadline_at_s, now) * (1 + 1e-9) + 1e-9


@given(dags(), st.floats(0, 500))
def test_stages_that_wait_for_all_before_them_and_keep_their_budgets_keep_the_deadline(
    flow: Workflow, now: float
) -> None:
    stages = tuple(replace(each, done=False, passes=1) for each in flow.stages)
    flow = replace(flow, stages=stages, deadline_at_s=now + 100.0)
    finish: dict[str, float] = {}
    for each in flow.stages:
        start = max((finish[name] for name in each.after), default=now)
        finish[each.name] = due_at_s(start, flow, each.name)
    assert max(finish.values()) <= flow.deadline_at_s + 1e-6


@given(dags(), dags(), st.floats(0, 500))
def test_no_workflow_changes_anothers_budgets(one: Workflow, other: Workflow, now: float) -> None:
    before = [due_at_s(now, one, each.name) for each in one.stages]
    for each in other.stages:
        due_at_s(now, other, each.name)
    assert [due_at_s(now, one, each.name) for each in one.stages] == before


def test_a_cycle_is_named() -> None:
    with pytest.raises(budget.CyclicStages, match=r"the stages wait for each other: . -> . -> ."):
        budget.check_declaration((stage("a", 1.0, "b"), stage("b", 1.0, "a")))


def test_an_undeclared_predecessor_is_named() -> None:
    with pytest.raises(ValueError, match="stage 'b' comes after 'x', which is not declared"):
        budget.check_declaration((stage("a", 1.0), stage("b", 1.0, "x")))


def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    stages = [stage("s0", 1.0)] + [stage(f"s{i}", 1.0, f"s{i - 1}") for i in range(1, 5000)]
    assert budget.of_call(0.0, workflow(*stages), "s0").rest_s == 4999.0


@given(flow=dags(), waits=st.integers(0, 7), ends=st.integers(0, 7), now=st.floats(0, 100))
def test_the_end_of_a_stage_that_is_not_behind_a_waiting_call_leaves_its_budget(
    flow: Workflow, waits: int, ends: int, now: float
) -> None:
    count = len(flow.stages)
    waiting, ended = flow.stages[waits % count].name, flow.stages[ends % count].name
    behind = any(ended in path[path.index(waiting) :] for path in paths(flow) if waiting in path)
    after = replace(flow, stages=tuple(replace(s, done=s.done or s.name == ended) for s in flow.stages))
    if not behind:
        assert budget.of_call(now, after, waiting) == budget.of_call(now, flow, waiting)
