"""The base of the suites whose traces are text-to-SQL workflows of both databases, one trace for each seed."""

import random
from collections.abc import Sequence

from tidegate_sim import suite, text2sql_workflows
from tidegate_sim.trace_format import TraceCall


class SeededText2Sql(suite.Suite):
    """A suite whose trace has its seed as its name."""

    @property
    def traces(self) -> Sequence[str]:
        return self.chosen_traces(suite.Options())

    def chosen_traces(self, options: suite.Options) -> Sequence[str]:
        return options.traces or tuple(map(str, self.chosen_seeds(options)))

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        rng = random.Random(int(key.trace))
        databases = text2sql_workflows.BOTH
        return text2sql_workflows.trace(rng, databases, workflows=key.workflows, rate=key.rate, name=key.trace)

    def learned_from(self) -> Sequence[TraceCall]:
        return text2sql_workflows.learned()

    def seed(self, key: suite.CellKey) -> int:
        return int(key.trace)
