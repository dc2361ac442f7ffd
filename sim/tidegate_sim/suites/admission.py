"""The suite about workflow admission: does a bound on active workflows pay, and does it cost below the knee?

Text-to-SQL workflows run on two pools of unequal engines at shares of each pool's capacity. The settings are the product's,
with and without the bound. The capacity is one workflow in the seconds of the whole pool that a mean workflow takes
(`engine_table.EngineTable.measure`). A trace is a seed. The bound is learned during the run, so that the first workflows
run without one.
"""

from collections.abc import Mapping, Sequence

from tidegate_policy import gateway_core
from tidegate_policy.admit import outliers
from tidegate_policy.dispatch import engine_table, waiting_limits
from tidegate_policy.model import NO_BACKLOG, Call, CallId
from tidegate_sim import bench_report, cell, paired_difference, pools, seeded_text2sql, suite
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

UNBOUNDED, BOUNDED = "any number of active workflows", "active workflows bounded"
LOADS = (0.6, 0.85, 1.0, 1.1)
"""Shares of the capacity."""
FIGURES = {"p95_s": "95% of workflows", "mean_s": "mean", "p50_s": "median"}


def _row(*, bounded: bool) -> cell.Row:
    return cell.Row(gateway=gateway_core.CoreSettings(limits=waiting_limits.Limits(bound_workflows=bounded)))


ROWS: Mapping[str, cell.Row] = {UNBOUNDED: _row(bounded=False), BOUNDED: _row(bounded=True)}


class Admission(seeded_text2sql.SeededText2Sql):
    """The suite."""

    name = "admission"
    first_seed = 901
    workflows = 80

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return ROWS

    def loads(self, options: suite.Options) -> Mapping[str, Sequence[float]]:
        """Rates in workflows a second. `--rates` gives shares of the capacity."""
        return {
            pool: [round(share * _capacity(pool, self.learned_from()), 4) for share in options.rates or LOADS]
            for pool in options.pools or self.pools
        }

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        return {**bench_report.numbers(outcome), "p95_s": bench_report.attained_s(outcome.latencies_s, 0.95)}

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        checks = suite.Checks(scheduler=options.scheduler)
        loads = self.loads(options)
        results = suite.run_cells(self.keys(options, loads), options, checks, tell)
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "traces": list(self.chosen_traces(options)),
            "cells": [
                {
                    "pool": pool,
                    "rate": rate,
                    "load": share,
                    "rows": {row: _figures(results, pool, rate, row) for row in ROWS},
                    "change": _change(results, pool, rate),
                }
                for pool, rates in loads.items()
                for rate, share in zip(rates, options.rates or LOADS, strict=True)
            ],
        }

    def table(self, report: Report) -> str:
        header = ("pool, load", *(f"{words}, s: without, with, change" for words in FIGURES.values()))
        rows = []
        for found in report["cells"]:
            cells = []
            for key in FIGURES:
                without, bounded = (found["rows"][row][key]["mean"] for row in (UNBOUNDED, BOUNDED))
                cells.append(f"{without:.0f} {bounded:.0f} {bench_report.change(found['change'][key])}")
            rows.append((f"{found['pool']}, {found['load']:.0%} ({found['rate']:g} q/s)", *cells))
        return "\n\n".join(
            [
                "Latency of text-to-SQL workflows; changes are paired by seed, with 95% intervals.",
                bench_report.table(header, rows),
                report["scheduler"]["sentence"],
            ]
        )


SUITE = Admission()


def _capacity(pool: str, calls: Sequence[TraceCall]) -> float:
    """Workflows a second."""
    table = engine_table.EngineTable(None, outliers.OutlierSettings())
    for name, model in pools.pool(pool).items():
        table.update(engine_table.EngineFacts(id=name, cost=model), lambda: NO_BACKLOG)
    demand_s = 0.0
    for call in calls:
        demand_s += table.measure(
            Call(
                id=CallId(call.id),
                arrived_at_s=0.0,
                prompt_tokens=call.prompt_tokens,
                output_predicted=call.output_tokens,
            ),
            cached_tokens=0,
        )[1]
    return len({call.workflow for call in calls}) / demand_s


def _values(results: Mapping[suite.CellKey, Report], pool: str, rate: float, row: str, key: str) -> list[float]:
    return [run[key] for found, run in results.items() if (found.pool, found.rate, found.row) == (pool, rate, row)]


def _figures(results: Mapping[suite.CellKey, Report], pool: str, rate: float, row: str) -> Report:
    return {key: paired_difference.interval(_values(results, pool, rate, row, key)) for key in FIGURES}


def _change(results: Mapping[suite.CellKey, Report], pool: str, rate: float) -> Report:
    """The figures with the bound over those without it."""
    return {
        key: paired_difference.times_better(
            _values(results, pool, rate, UNBOUNDED, key), _values(results, pool, rate, BOUNDED, key)
        )
        for key in FIGURES
    }
