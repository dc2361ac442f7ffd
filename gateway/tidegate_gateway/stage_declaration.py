"""What is a declared stage of a workflow? One shape for templates, HTTP, gRPC and the store, and the checks of a list
of them.

Sizes are checked first: a list that is too long costs no other work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_policy import budget
from tidegate_policy.model import StageState

MOST_STAGES = 200
"""The stages of one workflow; its record is one document."""
MOST_EDGES = 3072
"""All names in the `after` lists of one workflow."""
MOST_RECORD_BYTES = 64 * 1024
"""Of the record of a workflow, while it runs and afterwards."""
RECORD_BYTES, STAGE_BYTES = 2048, 250
"""What the record takes at most without stages, and what a stage takes at most without its names."""
MOST_PARALLEL = 1000


class BadStages(ValueError):
    """A declaration that cannot be used; `where` is the index and the field of the stage, or "" for the whole list."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeclaration:
    """A stage as a client or a template declares it."""

    name: str
    """The `x-tidegate-stage` of its calls."""
    after: tuple[str, ...] = ()
    """Names of the stages that must be over before this one starts."""
    parallel: int | None = None
    """Calls that the stage makes at the same time; null = undeclared, or 1 where the stage repeats."""
    repeat: int = 1
    """How often they may be repeated, at most."""

    @property
    def calls_at_a_time(self) -> int:
        """Declared calls at a time, 0 = undeclared; a stage that repeats can end only if its calls are counted."""
        if self.parallel is not None:
            return self.parallel
        return 1 if self.repeat > 1 else 0


def check_sizes(after_lists: Sequence[Sequence[object]]) -> None:
    """Checks the sizes of a declaration, given the `after` list of each stage. Raises `BadStages`."""
    if len(after_lists) > MOST_STAGES:
        raise BadStages("", f"must be a list of at most {MOST_STAGES} stages")
    for i, after in enumerate(after_lists):
        if len(after) > MOST_STAGES:
            raise BadStages(f"[{i}].after", f"must be a list of at most {MOST_STAGES} stage names")
    if sum(map(len, after_lists)) > MOST_EDGES:
        raise BadStages("", f"must have at most {MOST_EDGES} names in all after lists together")


def record_bytes(stages: Sequence[StageDeclaration]) -> int:
    """The most that the record of a workflow with these stages takes; between two names stand two characters."""
    names = sum(len(stage.name) + sum(len(name) + 2 for name in stage.after) for stage in stages)
    return RECORD_BYTES + STAGE_BYTES * len(stages) + names


def check(stages: Sequence[StageDeclaration]) -> None:
    """Checks a whole declaration: sizes, no name twice, known predecessors, no cycle. Raises `BadStages`."""
    check_sizes([stage.after for stage in stages])
    if record_bytes(stages) > MOST_RECORD_BYTES:
        raise BadStages("", f"need a record of more than {MOST_RECORD_BYTES} bytes: use fewer stages, or shorter names")
    for i, stage in enumerate(stages):
        if len(set(stage.after)) < len(stage.after):
            raise BadStages(f"[{i}].after", "must name each stage at most once")
    try:
        budget.check_declaration(tuple(StageState(name=stage.name, after=stage.after) for stage in stages))
    except ValueError as error:
        raise BadStages("", f"are wrong: {error}") from error
