"""By when must this call finish, given its workflow's deadline? (HexGen eq 5)

Time left is shared over the longest remaining path in proportion to expected cost. Parallel calls of a stage share the
stage's budget (they do not add up), and time a tool takes is part of the elapsed time. Every function reads the
workflow value it is given and nothing else, so no workflow can shorten another's budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_policy.model import StageState, Workflow, WorkflowId


class CyclicStages(ValueError):
    """The stages of a workflow wait for each other; the message names one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a workflow grants one call."""

    due_s: float
    """Instant by which the call should finish."""
    rest_s: float
    """Expected seconds of the longest path behind it, later passes of its own stage included (`tg.left_ms`)."""


def due_s(now: float, deadline_s: float, *, cost_s: float, rest_s: float) -> float:
    """`now + t_slo`: the instant by which a call should finish that is ready now (HexGen eq 5), never before `now`.

    `deadline_s`: the workflow's deadline, an instant; `cost_s`: mean seconds of the call; `rest_s`: mean seconds of the
    longest path that still has to be walked behind it.
    """
    left_s = max(deadline_s - now, 0.0)
    return now + (left_s * cost_s / (cost_s + rest_s) if cost_s > 0 and rest_s > 0 else left_s)


def of_call(now: float, workflow: Workflow, stage: str) -> Budget:
    """The budget of a call of `stage`, ready now. An undeclared stage may use all the time that is left."""
    mine = next((item for item in workflow.stages if item.name == stage), None)
    if mine is None:
        return Budget(due_s=max(workflow.deadline_s, now), rest_s=0.0)
    followers = _followers(workflow)
    tails = _longest(workflow, followers)
    behind_s = max((tails[name] for name in followers[stage]), default=0.0)
    rest_s = mine.mean_s * (mine.passes - 1) + behind_s
    return Budget(due_s=due_s(now, workflow.deadline_s, cost_s=mine.mean_s, rest_s=rest_s), rest_s=rest_s)


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
    cost = {stage.name: 0.0 if stage.done else stage.mean_s * stage.passes for stage in workflow.stages}
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
    flow = Workflow(id=WorkflowId(""), arrival_s=0.0, deadline_s=0.0, stages=stages)
    _longest(flow, _followers(flow))
