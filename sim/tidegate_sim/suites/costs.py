"""The suite about learned costs: how much latency does a gateway lose that starts with wrong profiles of its engines?

Text-to-SQL workflows run on two pools of unequal engines. The reference knows every engine exactly and learns nothing. The
other rows start with wrong profiles, or without profiles, and keep them or learn from streams. A trace is a seed. Rows are
compared over the same workflows: those that arrive after 200 calls have ended in both runs.
"""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean

from tidegate_policy import gateway_core
from tidegate_policy.dispatch import dispatcher
from tidegate_sim import beliefs, bench_report, cell, paired_difference, suite, text2sql_workflows
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

REFERENCE = "exact profiles, no learning"
LEARNED_CALLS = 200
DATABASES = (text2sql_workflows.FINANCIAL, text2sql_workflows.FORMULA1)
FIRST_SEED, SEEDS = 701, 5


def _row(start: beliefs.Beliefs, *, learns: bool) -> cell.Row:
    limits = dispatcher.Limits(bound_workflows=False)
    return cell.Row(gateway=gateway_core.CoreSettings(learn_costs=learns, limits=limits), profiles=start)


ROWS: Mapping[str, cell.Row] = {
    REFERENCE: _row("exact", learns=False),
    "exact profiles, learning": _row("exact", learns=True),
    "all believed equal, no learning": _row("equal", learns=False),
    "all believed equal, learning": _row("equal", learns=True),
    "40% wrong, no learning": _row("wrong-40", learns=False),
    "40% wrong, learning": _row("wrong-40", learns=True),
    "no profiles, learning": _row("none", learns=True),
}


class Costs(suite.Suite):
    """The suite."""

    name = "costs"
    rates = (0.12, 0.2)
    workflows = 60

    @property
    def traces(self) -> Sequence[str]:
        return tuple(str(FIRST_SEED + index) for index in range(SEEDS))

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return ROWS

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        rng = random.Random(int(key.trace))
        return text2sql_workflows.trace(rng, DATABASES, workflows=key.workflows, rate=key.rate, name=key.trace)

    def learned_from(self) -> Sequence[TraceCall]:
        return text2sql_workflows.trace(random.Random(7), DATABASES, workflows=200, rate=1.0, name="learned")

    def seed(self, key: suite.CellKey) -> int:
        return int(key.trace)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """The arrival and the latency of each workflow, and the instant at which enough calls had ended."""
        arrived_at_s: dict[str, float] = {}
        ended_at_s: dict[str, float] = {}
        for call in outcome.calls:
            name = call.workflow or call.id
            arrived_at_s[name] = min(arrived_at_s.get(name, call.arrived_at_s), call.arrived_at_s)
            ended_at_s[name] = max(ended_at_s.get(name, 0.0), call.finished_at_s or 0.0)
        ends = sorted(call.finished_at_s or 0.0 for call in outcome.calls)
        return {
            "taught_at_s": ends[min(LEARNED_CALLS, len(ends)) - 1],
            "arrived_at_s": arrived_at_s,
            "latency_s": {name: ended_at_s[name] - at_s for name, at_s in arrived_at_s.items()},
        }

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        checks = suite.Checks(scheduler=options.scheduler)
        results = suite.run_cells(self.keys(options, self.loads(options)), options, checks, tell)
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "cells": [
                {"pool": pool, "rate": rate, "rows": {row: _compared(results, pool, rate, row) for row in ROWS}}
                for pool, rates in self.loads(options).items()
                for rate in rates
            ],
        }

    def table(self, report: Report) -> str:
        parts = [
            "Mean latency of workflows over that with exact profiles: after 200 calls, and of the whole trace.\n"
            "Geometric means over seeds with 95% intervals, paired by seed."
        ]
        for found in report["cells"]:
            header = (f"{found['pool']}, {found['rate']:g} q/s", "after 200 calls", "whole trace")
            rows = [
                (name, bench_report.spread(row["later"], 3), bench_report.spread(row["whole"], 3))
                for name, row in found["rows"].items()
            ]
            parts.append(bench_report.table(header, rows))
        return "\n\n".join([*parts, report["scheduler"]["sentence"]])


SUITE = Costs()


def _compared(results: Mapping[suite.CellKey, Report], pool: str, rate: float, row: str) -> Report:
    """A row's mean latency over that of the reference, of all workflows and of the later ones."""
    runs = {(key.row, key.trace): figures for key, figures in results.items() if (key.pool, key.rate) == (pool, rate)}
    later: tuple[list[float], list[float]] = ([], [])
    whole: tuple[list[float], list[float]] = ([], [])
    for (name, trace), figures in runs.items():
        if name != row:
            continue
        reference = runs[REFERENCE, trace]
        from_at_s = max(reference["taught_at_s"], figures["taught_at_s"])
        late = [item for item, at_s in reference["arrived_at_s"].items() if at_s >= from_at_s]
        for index, run in enumerate((figures, reference)):
            later[index].append(fmean(run["latency_s"][item] for item in late or run["latency_s"]))
            whole[index].append(fmean(run["latency_s"].values()))
    return {
        "later": paired_difference.times_better(later[1], later[0]),
        "whole": paired_difference.times_better(whole[1], whole[0]),
    }
