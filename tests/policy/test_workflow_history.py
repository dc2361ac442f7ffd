"""What finished workflows teach: the work behind a stage, the order of the stages, their calls and their parallelism."""

import pytest

from tidegate_policy.model import CallId, WorkflowId
from tidegate_policy.predict import workflow_history
from tidegate_policy.predict.remaining_work import RemainingWork
from tidegate_policy.predict.workflow_history import WorkflowHistory

TENANT, WORKFLOW = "acme", WorkflowId("w")


def history() -> tuple[WorkflowHistory, RemainingWork, list[tuple[float, float]]]:
    work, finished = RemainingWork(), list[tuple[float, float]]()
    return WorkflowHistory(work, lambda tenant, path_s, demand_s: finished.append((path_s, demand_s))), work, finished


def run(
    made: WorkflowHistory,
    calls: list[tuple[str, float, float, float]],
    workflow: WorkflowId = WORKFLOW,
    template: str = "",
) -> None:
    """Calls as (stage, arrival, end, seconds alone), each with a demand of one second."""
    events = [(arrived, 1, index) for index, (_, arrived, _, _) in enumerate(calls)]
    events += [(ended, 0, index) for index, (_, _, ended, _) in enumerate(calls)]
    for now, arrives, index in sorted(events):
        stage, _, _, own_s = calls[index]
        if arrives:
            made.on_call(now, workflow, CallId(f"{workflow}{index}"), stage, tenant=TENANT, template=template)
        else:
            made.on_end(now, workflow, CallId(f"{workflow}{index}"), own_s, 1.0)


PLAN_TWO_WORK_JUDGE = [
    ("plan", 0.0, 2.0, 1.0),
    ("work", 2.0, 5.0, 2.0),
    ("work", 2.0, 9.0, 4.0),
    ("judge", 9.0, 10.0, 0.5),
]


def test_the_longest_chain_of_later_calls_is_the_work_behind_a_stage() -> None:
    made, work, finished = history()
    run(made, PLAN_TWO_WORK_JUDGE)
    assert work.predict((TENANT, "", "plan")) is None, "the workflow has not finished"
    made.on_workflow_end(10.0, WORKFLOW, ok=True)
    assert work.predict((TENANT, "", "plan")) == pytest.approx(4.5)
    assert work.predict((TENANT, "", "work")) == pytest.approx(0.5)
    assert work.predict((TENANT, "", "judge")) == 0.0
    assert finished == [(pytest.approx(5.5), 4.0)]


def test_a_template_shows_order_repeats_and_parallelism() -> None:
    made, _, _ = history()
    run(made, PLAN_TWO_WORK_JUDGE)
    made.on_workflow_end(10.0, WORKFLOW, ok=True)
    stages = made.stages(TENANT)
    assert list(stages) == ["plan", "work", "judge"]
    assert (stages["work"].calls, stages["work"].parallel) == (2.0, 2.0)
    assert (stages["plan"].place, stages["judge"].place) == (0.0, 1.0)


def test_an_end_that_comes_before_the_last_call_has_left_waits_for_it() -> None:
    made, work, _ = history()
    made.on_call(0.0, WORKFLOW, CallId("a"), "plan", tenant=TENANT)
    made.on_workflow_end(1.0, WORKFLOW, ok=True)
    assert work.predict((TENANT, "", "plan")) is None
    made.on_end(1.0, WORKFLOW, CallId("a"), 0.7)
    assert work.predict((TENANT, "", "plan")) == 0.0


def test_a_cancelled_workflow_teaches_nothing_and_a_failed_call_is_left_out() -> None:
    made, work, _ = history()
    run(made, PLAN_TWO_WORK_JUDGE)
    made.on_workflow_end(10.0, WORKFLOW, ok=False)
    assert work.predict((TENANT, "", "plan")) is None
    made.on_call(20.0, WORKFLOW, CallId("x"), "broken", tenant=TENANT)
    made.on_end(21.0, WORKFLOW, CallId("x"), None)
    made.on_workflow_end(22.0, WORKFLOW, ok=True)
    assert work.predict((TENANT, "", "broken")) is None


def test_a_workflow_that_is_idle_for_long_counts_as_finished() -> None:
    made, work, _ = history()
    run(made, PLAN_TWO_WORK_JUDGE)
    made.expire(10.0 + workflow_history.IDLE_S)
    assert work.predict((TENANT, "", "plan")) == pytest.approx(4.5)


def test_a_stage_has_no_calls_where_the_end_of_a_whole_workflow_of_its_template_says_so() -> None:
    made, _, _ = history()

    def has_no_calls(template: str = "sql") -> list[str]:
        return [stage for stage in ("plan", "run", "judge") if made.has_no_calls(TENANT, template, stage)]

    run(made, PLAN_TWO_WORK_JUDGE[:1], template="sql")
    made.expire(10.0 + workflow_history.IDLE_S)
    assert list(made.stages(TENANT, "sql")) == ["plan"]
    assert has_no_calls() == [], "its other calls may still come, or went through another gateway"
    run(made, PLAN_TWO_WORK_JUDGE, template="sql")
    made.on_workflow_end(10.0, WORKFLOW, ok=False, uncalled=["run"])
    assert has_no_calls() == [], "a cancelled workflow lacks what it had not reached"
    run(made, PLAN_TWO_WORK_JUDGE, template="sql")
    made.on_workflow_end(10.0, WORKFLOW, ok=True, uncalled=["run"])
    assert has_no_calls() == ["run"]
    run(made, [("run", 0.0, 1.0, 1.0)], template="sql")
    made.on_workflow_end(1.0, WORKFLOW, ok=True, uncalled=["plan", "judge"])
    assert has_no_calls() == [], "each stage had a call in some workflow"
    run(made, [("ask", 0.0, 1.0, 1.0)])
    made.on_workflow_end(1.0, WORKFLOW, ok=True, uncalled=["run"])
    assert has_no_calls("") == [], "workflows without a template have no stages in common"


def test_what_is_known_of_stages_without_calls_takes_bounded_memory() -> None:
    made, _, _ = history()
    for index in range(workflow_history.MAX_TEMPLATES + 20):
        run(made, [("ask", 0.0, 1.0, 1.0)], template=f"template {index}")
        made.on_workflow_end(1.0, WORKFLOW, ok=True, uncalled=[f"stage {number}" for number in range(1000)])
    assert len(made._uncalled) == workflow_history.MAX_TEMPLATES
    known = made._uncalled.get(TENANT, f"template {index}")
    assert known is not None
    assert len(known) == workflow_history.MAX_STAGES
