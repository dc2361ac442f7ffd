"""The suite about learned costs: how much latency does a gateway lose that starts with wrong profiles of its engines?

Text-to-SQL workflows run on two pools of unequal engines. The reference knows every engine exactly and learns nothing. The
other rows start with wrong profiles, or without profiles, and keep them or learn from streams. A trace is a seed. Rows are
compared over the same workflows: those that arrive after 200 calls have ended in both runs.
"""

from collections.abc import Mapping
from statistics import fmean

from tidegate_policy import gateway_core
from tidegate_policy.dispatch import waiting_limits
from tidegate_sim import beliefs, bench_report, cell, paired_difference, seeded_text2sql, slowdown, suite
from tidegate_sim.bench_report import Report

REFERENCE = "exact profiles, no learning"
LEARNED_CALLS = 200


def _row(start: beliefs.Beliefs, *, learns: bool) -> cell.Row:
    limits = waiting_limits.Limits(bound_workflows=False)
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


class Costs(seeded_text2sql.SeededText2Sql):
    """The suite."""

    name = "costs"
    first_seed = 701
    rates = (0.12, 0.2)
    workflows = 60

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return ROWS

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """The arrival and the latency of each workflow, and the instant at which enough calls had ended."""
        spans = slowdown.spans(outcome)
        ends = sorted(call.finished_at_s or 0.0 for call in outcome.calls)
        return {
            "taught_at_s": ends[min(LEARNED_CALLS, len(ends)) - 1],
            "arrived_at_s": {name: arrived_at_s for name, (arrived_at_s, _) in spans.items()},
            "latency_s": {name: ended_at_s - arrived_at_s for name, (arrived_at_s, ended_at_s) in spans.items()},
        }

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        checks = suite.Checks(scheduler=options.scheduler)
        results = suite.run_cells(self.keys(options, self.loads(options)), options, checks, tell)
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "traces": list(self.chosen_traces(options)),
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
