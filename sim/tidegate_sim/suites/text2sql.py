"""The text-to-SQL suite: agentic workflows on two pools of unequal engines (HexGen-Text2SQL, section 5).

This file holds the whole suite: traces, rows, the comparison with the paper, and the table, so it is longer than most.
Every row runs vLLM's scheduler with the same batch limits, KV size and prefix cache. Rows differ in the dispatch rule
and in the scheduling policy. One setting of each method serves all cells. Lengths and remaining work are learned from a
trace that no cell runs. Two loads are the paper's, far above what the pools can sustain. The third load is 0.7 of their
measured capacity.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

from tidegate_policy import gateway_core, policies
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_sim import bench_report, cell, suite, text2sql_workflows
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

DATABASES: Mapping[str, Sequence[text2sql_workflows.Database]] = {
    "financial": (text2sql_workflows.FINANCIAL,),
    "formula1": (text2sql_workflows.FORMULA1,),
    "both": (text2sql_workflows.FINANCIAL, text2sql_workflows.FORMULA1),
}
"""The paper's three traces: one database each, and both."""
SEEDS: Mapping[str, int] = {"financial": 101, "formula1": 102, "both": 103}
"""Fixed before the first run."""
LEARNED_FROM, LEARNED_WORKFLOWS = 7, 200
"""Seed and length of the trace that lengths and remaining work are learned from."""
RATES = (0.5, 1.0)
"""The paper's loads, in workflows a second."""
BELOW_CAPACITY = 0.7

SCORE = DispatchSettings(rule="score", alpha=0.2, beta=300.0)
"""alpha is among the paper's best (0.1 to 0.4). beta, which the paper does not publish, was chosen on other seeds."""

PAPERS_ROW, STRONG_ROW = "RR + FCFS", "least requests + FCFS"
HEXGEN, OURS = "score + urgency", "least delay + urgency"
"""The paper's method, and the product's default: one setting each for all cells."""


def _row(rule: str, policy: str) -> cell.Row:
    dispatch = SCORE if rule == SCORE.rule else DispatchSettings(rule=rule)
    return cell.Row(gateway=gateway_core.CoreSettings(policy=policy, dispatch=dispatch))


ROWS: Mapping[str, cell.Row] = {
    PAPERS_ROW: _row("round-robin", "fcfs"),
    STRONG_ROW: _row("least-requests", "fcfs"),
    "power of two + FCFS": _row("power-of-two", "fcfs"),
    "RR + urgency": _row("round-robin", "urgency"),
    "score + FCFS": _row("score", "fcfs"),
    HEXGEN: _row("score", "urgency"),
    OURS: _row(DispatchSettings().rule, policies.DEFAULT),
}

PAPER = {
    PAPERS_ROW: {"deadline_95": (1.67, 1.41), "deadline_99": (1.60, 1.35), "throughput": (1.75, 1.65)},
    "RR + urgency": {"deadline_95": (1.38, 1.18), "deadline_99": (1.40, 1.24)},
    "score + FCFS": {"deadline_95": (1.50, 1.20), "deadline_99": (1.40, 1.20)},
}
"""By how much the paper's system beats a row, on its cards and traces (sections 5.2, 5.3): (best cell, mean of cells)."""


class Text2Sql(suite.Suite):
    """The suite."""

    name = "text2sql"
    pools = ("hetero-1", "hetero-2")
    rates = RATES
    workflows = 32
    """Fixed, because in an overloaded open-loop run figures grow with the length of the trace."""

    @property
    def traces(self) -> Sequence[str]:
        return tuple(DATABASES)

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return ROWS

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        return text2sql_workflows.trace(
            random.Random(SEEDS[key.trace]),
            DATABASES[key.trace],
            workflows=key.workflows,
            rate=key.rate,
            name=key.trace,
        )

    def learned_from(self) -> Sequence[TraceCall]:
        return text2sql_workflows.trace(
            random.Random(LEARNED_FROM), DATABASES["both"], workflows=LEARNED_WORKFLOWS, rate=1.0, name="learned"
        )

    def seed(self, key: suite.CellKey) -> int:
        return SEEDS[key.trace]

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        """Runs the paper's loads, measures each pool's capacity from them, and runs a load below it. Takes minutes."""
        checks = suite.Checks(scheduler=options.scheduler)
        at_papers_rates = self._cells(options, self.loads(options), checks, tell)
        capacity = {pool: _capacity(at_papers_rates, pool) for pool in self.loads(options)}
        below = self._cells(
            options, {pool: [round(BELOW_CAPACITY * capacity[pool], 4)] for pool in self.loads(options)}, checks, tell
        )
        cells = sorted([*at_papers_rates, *below], key=lambda found: (found["pool"], found["rate"]))
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "settings": {
                "workflows": options.workflows or self.workflows,
                "seeds": dict(SEEDS),
                "learned_from": {"seed": LEARNED_FROM, "workflows": LEARNED_WORKFLOWS},
                "rows": {name: asdict(row) for name, row in ROWS.items()},
            },
            "real": [
                "vLLM's Scheduler and KV-cache manager, or their fast model",
                "the queue that production loads",
                "the gateway's core: admission, prediction, budgets, dispatch",
            ],
            "modelled": [
                "step time and KV capacity, from profiles",
                "lengths, from generators",
                "no network, no SQL execution",
            ],
            "methods": [HEXGEN, OURS],
            "baseline": PAPERS_ROW,
            "strong": STRONG_ROW,
            "capacity": capacity,
            "cells": cells,
            "paper": PAPER,
            "against": {
                method: {row: _against(cells, method, row) for row in ROWS if row not in (HEXGEN, OURS)}
                for method in (HEXGEN, OURS)
            },
        }

    def table(self, report: Report) -> str:
        """A table for each cell, the paper's figures beside ours, and where we fall short."""
        parts = [_heading(report)]
        parts += [_cell_table(found) for found in report["cells"]]
        parts.append(_paper_table(report))
        parts.append("\n".join(_shortfalls(report)))
        parts.append(report["scheduler"]["sentence"])
        return "\n\n".join(parts)

    def _cells(
        self, options: suite.Options, rates: Mapping[str, Sequence[float]], checks: suite.Checks, tell: suite.Tell
    ) -> list[Report]:
        results = suite.run_cells(self.keys(options, rates), options, checks, tell)
        return [
            {
                "pool": pool,
                "rate": rate,
                "rows": {
                    row: _over_traces(
                        {
                            key.trace: figures
                            for key, figures in results.items()
                            if (key.pool, key.rate, key.row) == (pool, rate, row)
                        }
                    )
                    for row in ROWS
                },
            }
            for pool, pool_rates in rates.items()
            for rate in pool_rates
        ]


SUITE = Text2Sql()


def _over_traces(by_trace: Mapping[str, Report]) -> Report:
    shown = ("deadline_95_s", "deadline_99_s", "mean_s", "throughput", "queued_share")
    runs = list(by_trace.values())
    return {**{key: bench_report.over_traces(runs, key) for key in shown}, "traces": dict(by_trace)}


def _capacity(cells: Sequence[Report], pool: str) -> float:
    """Workflows a second that the best row completes at the highest load, the ends of the trace included."""
    highest = max((cell for cell in cells if cell["pool"] == pool), key=lambda cell: cell["rate"])
    return max(float(row["throughput"]["mean"]) for row in highest["rows"].values())


def _against(cells: Sequence[Report], method: str, row: str) -> Report:
    """How many times better a method is than a row: best and mean over the cells and traces at the paper's loads."""
    ratios: dict[str, list[float]] = {"deadline_95": [], "deadline_99": [], "throughput": []}
    for found in [found for found in cells if found["rate"] in RATES] or cells:
        for trace, better in found["rows"][method]["traces"].items():
            other = found["rows"][row]["traces"][trace]
            ratios["deadline_95"].append(other["deadline_95_s"] / better["deadline_95_s"])
            ratios["deadline_99"].append(other["deadline_99_s"] / better["deadline_99_s"])
            ratios["throughput"].append(better["throughput"] / other["throughput"])
    return {key: {"best": max(values), "mean": fmean(values)} for key, values in ratios.items()}


def _heading(result: Report) -> str:
    settings = result["settings"]
    capacity = ", ".join(f"{pool} {rate:.3f}" for pool, rate in result["capacity"].items())
    return (
        f"text2sql: traces {', '.join(settings['seeds'])}; {settings['workflows']} workflows each, Poisson arrivals.\n"
        f"Figures are means of the traces, with the lowest and the highest.\n"
        f"Real: {'; '.join(result['real'])}. Modelled: {'; '.join(result['modelled'])}.\n"
        f"Measured capacity, workflows a second: {capacity}."
    )


def _cell_table(cell: Report) -> str:
    header = (
        f"{cell['pool']}, {cell['rate']:g} q/s",
        "deadline at 95%, s",
        "at 99%, s",
        "mean, s",
        "throughput, q/s",
        "calls that queued in an engine",
    )
    rows = [
        (
            name,
            bench_report.spread(row["deadline_95_s"]),
            bench_report.spread(row["deadline_99_s"]),
            bench_report.spread(row["mean_s"]),
            bench_report.spread(row["throughput"], 3),
            f"{row['queued_share']['mean']:.0%}",
        )
        for name, row in cell["rows"].items()
    ]
    return bench_report.table(header, rows)


def _paper_table(result: Report) -> str:
    """Each method against each row at the paper's loads, beside what the paper reports of its own."""
    words = {"deadline_95": "deadline at 95%", "deadline_99": "at 99%", "throughput": "throughput"}
    rows = [
        (
            f"{row}: {words[key]}",
            *(_pair(result["against"][method][row][key]) for method in result["methods"]),
            "{:.2f} / {:.2f}".format(*paper) if (paper := result["paper"].get(row, {}).get(key)) else "-",
        )
        for row in result["against"][result["methods"][0]]
        for key in words
    ]
    header = ("times better than (best / mean of cells and traces)", *result["methods"], "paper")
    return bench_report.table(header, rows)


def _pair(ratio: Report) -> str:
    return f"{ratio['best']:.2f} / {ratio['mean']:.2f}"


def _shortfalls(result: Report) -> list[str]:
    """Where the paper's mean ratio is missed, where the strong baseline is not beaten, and what the runs show of why."""
    lines: list[str] = []
    for method in result["methods"]:
        for row, figures in result["paper"].items():
            for key, (_, paper_mean) in figures.items():
                mean = result["against"][method][row][key]["mean"]
                if mean < paper_mean:
                    lines.append(
                        f"{method} misses the paper's {key} against {row}: {mean:.2f} here, {paper_mean:.2f} there."
                    )
        lines += [line for cell in result["cells"] for line in _not_beaten(cell, method, result["strong"])]
    if not lines:
        return [f"Both methods reach the paper's mean ratios and beat {result['strong']} in every cell."]
    return [*lines, _why(result)]


def _not_beaten(cell: Report, method: str, strong: str) -> list[str]:
    words = {"deadline_95_s": "deadline at 95%", "deadline_99_s": "deadline at 99%", "mean_s": "mean"}
    figures = {key: (cell["rows"][method][key]["mean"], cell["rows"][strong][key]["mean"]) for key in words}
    where = f"{cell['pool']} at {cell['rate']:g} q/s"
    return [
        f"{method} does not beat {strong} on {where}, {words[key]}: {ours:.0f} s against {theirs:.0f} s."
        for key, (ours, theirs) in figures.items()
        if ours >= theirs
    ]


def _why(result: Report) -> str:
    baseline, strong, method = result["baseline"], result["strong"], result["methods"][0]
    queued = fmean(cell["rows"][method]["queued_share"]["mean"] for cell in result["cells"])
    gain = fmean(
        cell["rows"][baseline]["deadline_95_s"]["mean"] / cell["rows"][strong]["deadline_95_s"]["mean"]
        for cell in result["cells"]
    )
    return (
        f"Why: {strong} alone shortens the deadline at 95% of {baseline} by a factor of {gain:.2f} on average,\n"
        f"because fast engines finish sooner and so receive more calls. A scheduling policy acts only on calls that wait\n"
        f"in an engine's queue, {queued:.0%} under {method}. The other calls run at once, and the prompt chunks of their\n"
        f"neighbours stretch their decode steps. Neither the score nor the policy counts that; least delay does."
    )
