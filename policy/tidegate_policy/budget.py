"""By when must this call finish, given its workflow's deadline? (HexGen eq 5)

Time left is shared over the longest remaining path in proportion to expected cost. Parallel calls of a stage share the
stage's budget (they do not add up), and time a tool takes is part of the elapsed time. Every function reads the
workflow value it is given and nothing else, so no workflow can shorten another's budget.
"""

from collections.abc import Mapping

from tidegate_policy.model import StageState, Workflow


class CyclicStages(ValueError):
    """The stages of a workflow wait for each other; the message names one of them."""


def share_s(*, left_s: float, cost_s: float, path_s: float) -> float:
    """`t_slo` of one call: `left_s * cost_s / path_s` seconds, never negative (HexGen eq 5).

    `left_s`: seconds until the workflow's deadline; `cost_s`: the call's mean cost; `path_s`: cost of the longest path
    that still has to be walked through this call, this call included.
    """
    if left_s <= 0:
        return 0.0
    if cost_s <= 0 or path_s <= cost_s:
        return left_s
    return left_s * cost_s / path_s


def stage_due_s(now: float, workflow: Workflow, stage: str) -> float:
    """The instant at which `stage`, ready now, should finish. An undeclared stage may use all the time that is left."""
    left_s = workflow.deadline_s - now
    costs = {item.name: item.mean_s for item in workflow.stages}
    if stage not in costs:
        return now + max(left_s, 0.0)
    tail_s = remaining_after_s(workflow, stage)
    return now + share_s(left_s=left_s, cost_s=costs[stage], path_s=costs[stage] + tail_s)


def remaining_after_s(workflow: Workflow, stage: str) -> float:
    """Cost in seconds of the longest path of unfinished stages behind `stage` (`tg.left_ms`)."""
    return max((_tail(workflow)[name] for name in _followers(workflow).get(stage, ())), default=0.0)


def plan(now: float, workflow: Workflow) -> dict[str, float]:
    """The budget in seconds of every unfinished stage, as of `now`.

    Each stage's share is taken of the longest remaining path *through* it, so along any path the budgets add up to at
    most the time left.
    """
    tail = _tail(workflow)
    head = _head(workflow)
    return {
        stage.name: share_s(
            left_s=workflow.deadline_s - now,
            cost_s=stage.mean_s,
            path_s=head[stage.name] + tail[stage.name],
        )
        for stage in workflow.stages
        if not stage.done
    }


def _tail(workflow: Workflow) -> Mapping[str, float]:
    """Longest remaining cost from the start of each stage to the end of the workflow, the stage included."""
    followers = _followers(workflow)
    return _longest(workflow, followers)


def _head(workflow: Workflow) -> Mapping[str, float]:
    """Longest remaining cost before the start of each stage, the stage excluded."""
    names = {stage.name for stage in workflow.stages}
    before = {stage.name: tuple(name for name in stage.after if name in names) for stage in workflow.stages}
    including = _longest(workflow, before)
    cost = {stage.name: 0.0 if stage.done else stage.mean_s for stage in workflow.stages}
    return {name: including[name] - cost[name] for name in including}


def _followers(workflow: Workflow) -> dict[str, tuple[str, ...]]:
    names = {stage.name for stage in workflow.stages}
    followers: dict[str, list[str]] = {stage.name: [] for stage in workflow.stages}
    for stage in workflow.stages:
        for name in stage.after:
            if name in names:
                followers[name].append(stage.name)
    return {name: tuple(behind) for name, behind in followers.items()}


def _longest(workflow: Workflow, neighbours: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Longest path cost from each stage along `neighbours`, iteratively (a workflow may be thousands of stages long)."""
    cost = {stage.name: 0.0 if stage.done else stage.mean_s for stage in workflow.stages}
    longest: dict[str, float] = {}
    open_stages: set[str] = set()
    for start in cost:
        stack = [start]
        while stack:
            name = stack[-1]
            if name in longest:
                stack.pop()
                continue
            missing = [other for other in neighbours[name] if other not in longest]
            if not missing:
                longest[name] = cost[name] + max((longest[other] for other in neighbours[name]), default=0.0)
                open_stages.discard(name)
                stack.pop()
                continue
            if name in open_stages:
                raise CyclicStages(f"stage {name!r} waits for itself through its 'after' list")
            open_stages.add(name)
            stack.extend(missing)
    return longest


def declared(stages: tuple[StageState, ...]) -> None:
    """Checks a declaration: unique names, known predecessors, no cycle. Raises `ValueError` naming the stage."""
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"stage {name!r} is declared twice")
    for stage in stages:
        for before in stage.after:
            if before not in names:
                raise ValueError(f"stage {stage.name!r} comes after {before!r}, which is not declared")
    from tidegate_policy.model import WorkflowId

    _tail(Workflow(id=WorkflowId(""), arrival_s=0.0, deadline_s=0.0, stages=stages))
