"""By when should a call of a stage finish? The record of its workflow becomes the call's budget (HexGen eq 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_gateway import perceive
from tidegate_gateway.store import store_contract
from tidegate_gateway.workflows import workflow_service
from tidegate_policy import budget
from tidegate_policy.cost import CostModel
from tidegate_policy.model import StageState, Workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGrant:
    """The time that a workflow grants one call."""

    due_at_s: float
    """The instant by which this call should finish: its share of the time left."""
    deadline_at_s: float
    """The instant after which its answer is worthless: the workflow's deadline and its grace."""
    rest_s: float
    """Expected work of the workflow after this call."""


def grant(
    now: float,
    membership: workflow_service.Membership,
    predictor: perceive.Perception,
    costs: Sequence[CostModel],
    model: str,
    *,
    grace_s: float,
) -> StageGrant:
    """The grant of a call that joined its workflow at `now`."""
    record = membership.record
    states = tuple(
        StageState(
            name=stage.name,
            after=stage.after,
            mean_s=predictor.stage_seconds((membership.scope, stage.name, model), costs),
            passes=_passes(stage),
            done=stage.over,
        )
        for stage in record.stages
    )
    deadline_at_s = now + (record.deadline_ms - record.now_ms) / 1000
    workflow = Workflow(id=membership.workflow, arrival_s=now, deadline_s=deadline_at_s, stages=states)
    granted = budget.of_call(now, workflow, membership.stage)
    return StageGrant(due_at_s=granted.due_s, deadline_at_s=deadline_at_s + grace_s, rest_s=granted.rest_s)


def _passes(stage: store_contract.Stage) -> int:
    """Repetitions of a stage that may still come, this one included."""
    return max(1, stage.passes - stage.done // max(stage.parallel, 1))
