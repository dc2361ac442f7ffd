"""By when must a call finish, given its workflow's deadline? (HexGen eq 5)

The time left is shared over the longest remaining path in proportion to expected cost. Parallel calls of a stage share the
stage's budget; their costs do not add up. The time of a tool is part of the elapsed time. Every function reads only the
workflow value that it is given, so no workflow can shorten the budget of another.
"""

import graphlib
from collections.abc import Mapping, Sequence

from tidegate_policy import immutable
from tidegate_policy.model import StageState, Workflow


class CyclicStages(ValueError):
    """The stages of a workflow wait for each other; the message names them."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class Budget:
    """The share of a workflow's time that one call gets."""

    due_at_s: float
    """Instant by which the call should finish."""
    rest_s: float
    """Expected seconds of the longest path behind the call, later passes of its own stage included (`tg.left_ms`)."""


def due_at_s(now: float, deadline_at_s: float, *, cost_s: float, rest_s: float) -> float:
    """`now + t_slo`: the instant by which a call that is ready now should finish (HexGen eq 5); never before `now`.

    `deadline_at_s` is the instant of the workflow's deadline, `cost_s` the mean seconds of the call, and `rest_s` the mean
    seconds of the longest path behind the call.
    """
    left_s = max(deadline_at_s - now, 0.0)
    return now + (left_s * cost_s / (cost_s + rest_s) if cost_s > 0 and rest_s > 0 else left_s)


def of_call(now: float, workflow: Workflow, stage: str) -> Budget:
    """The budget of a call of `stage`, ready now. An undeclared stage may use all the time that is left."""
    mine = next((item for item in workflow.stages if item.name == stage), None)
    if mine is None:
        return Budget(due_at_s=max(workflow.deadline_at_s, now), rest_s=0.0)
    behind_s = _behind_s(workflow.stages)[stage]
    rest_s = mine.mean_s * (mine.passes - 1) + behind_s
    return Budget(due_at_s=due_at_s(now, workflow.deadline_at_s, cost_s=mine.mean_s, rest_s=rest_s), rest_s=rest_s)


def _behind_s(stages: Sequence[StageState]) -> dict[str, float]:
    """Seconds of the longest path that begins behind each stage. Raises `CyclicStages`. Each call of a workflow asks for
    this, so it takes O(stages + predecessors)."""
    by_name = {stage.name: stage for stage in stages}
    found = dict.fromkeys(by_name, 0.0)
    followers = dict.fromkeys(by_name, 0)
    """How many stages that follow each one have still to be looked at."""
    for stage in by_name.values():
        for name in stage.after:
            if name in followers:
                followers[name] += 1
    ready = [name for name, count in followers.items() if not count]
    looked_at = 0
    while ready:
        stage = by_name[ready.pop()]
        looked_at += 1
        path_s = found[stage.name] + (0.0 if stage.done else stage.mean_s * stage.passes)
        for name in stage.after:
            if name in followers:
                found[name] = max(found[name], path_s)
                followers[name] -= 1
                if not followers[name]:
                    ready.append(name)
    if looked_at < len(by_name):
        raise CyclicStages(f"the stages wait for each other: {' -> '.join(_cycle(by_name))}")
    return found


def _cycle(stages: Mapping[str, StageState]) -> Sequence[str]:
    """The names of a cycle."""
    before = {name: [other for other in stage.after if other in stages] for name, stage in stages.items()}
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    raise AssertionError("the stages have no cycle")


def check_declaration(stages: Sequence[StageState]) -> None:
    """Checks the stages of a declaration: unique names, known predecessors, no cycle. Raises `ValueError` naming the
    stage."""
    names: set[str] = set()
    for stage in stages:
        if stage.name in names:
            raise ValueError(f"stage {stage.name!r} is declared twice")
        names.add(stage.name)
    for stage in stages:
        for before in stage.after:
            if before not in names:
                raise ValueError(f"stage {stage.name!r} comes after {before!r}, which is not declared")
    _behind_s(stages)
