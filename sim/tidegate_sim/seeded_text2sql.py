"""The base of the suites whose traces are text-to-SQL workflows of both databases, one trace for each seed."""

import random
from collections.abc import Sequence
from typing import ClassVar

from tidegate_sim import suite, text2sql_workflows
from tidegate_sim.trace_format import TraceCall


class SeededText2Sql(suite.Suite):
    """A suite whose trace has its seed as its name."""

    first_seed: ClassVar[int]
    """Seeds are fixed beforehand: `first_seed`, and the numbers after it."""
    trace_count: ClassVar[int] = 5

    @property
    def traces(self) -> Sequence[str]:
        return tuple(str(self.first_seed + index) for index in range(self.trace_count))

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        rng = random.Random(int(key.trace))
        databases = text2sql_workflows.BOTH
        return text2sql_workflows.trace(rng, databases, workflows=key.workflows, rate=key.rate, name=key.trace)

    def learned_from(self) -> Sequence[TraceCall]:
        return text2sql_workflows.learned()

    def seed(self, key: suite.CellKey) -> int:
        return int(key.trace)
