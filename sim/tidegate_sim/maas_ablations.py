"""What does each part of steering add? The rows of the suite `maas` that leave one part out (H-MAS, Table 2).

They run on the trace `TRACE` only, as in the paper. Their figures are divided by those of `WHOLE`, seed by seed. Two of the
paper's rows need no row of their own: the suite has `fcfs` and `urgency`, the first policy of a pool, without selector.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_sim import bench_report, cell, paired_difference
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

TRACE = "stress"
WHOLE = "selector rules"
"""The row with all parts."""
WITHOUT_LANES, WITHOUT_TASKS, WITHOUT_GUARDS, WITH_LOOPS = (
    "without two-lane",
    "without names of tasks",
    "without guards",
    "with fence and load-band",
)
FIGURES = {"esg": "ESG", "ttft_95_s": "TTFT 95%", "tpot_95_s": "TPOT 95%", "goodput": "goodput"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """One line of the table."""

    row: str
    paper: str
    """The row of Table 2 that it stands for, and the figures there in the order of `FIGURES`."""


TABLE = (
    Ablation(row=WITHOUT_LANES, paper="disable two-lane: 0.88, 2.92, 1.08, 0.91"),
    Ablation(row="fcfs", paper="disable meta (FCFS): 0.78, 3.16, 1.07, 0.87"),
    Ablation(row="urgency", paper="none: the first policy stays"),
    Ablation(row=WITHOUT_GUARDS, paper="none"),
    Ablation(row=WITHOUT_TASKS, paper="rule-based perception: 0.28, 3.95, 0.88, 0.74"),
    Ablation(row=WITH_LOOPS, paper="the opposite of freeze Statera: 0.23, 6.57, 0.92, 0.63"),
)


def rows(whole: cell.Row) -> dict[str, cell.Row]:
    """The rows that only this table has; `whole` is the row with all parts."""
    steering = whole.steering
    assert steering is not None
    reckless = replace(steering.guards, dwell_s=0.0, rho=math.inf, per_hour=1_000_000)
    return {
        WITHOUT_LANES: replace(
            whole, steering=replace(steering, allow=tuple(name for name in steering.allow if name != "two-lane"))
        ),
        WITHOUT_GUARDS: replace(whole, steering=replace(steering, guards=reckless)),
        WITHOUT_TASKS: whole,
        WITH_LOOPS: replace(whole, regulators=("fence", "load-band")),
    }


def trace(row: str, calls: Sequence[TraceCall]) -> Sequence[TraceCall]:
    """The calls as the clients of a row send them: with `WITHOUT_TASKS` they do not say their task, by which the gateway
    predicts lengths. The targets stay."""
    return [replace(call, slo_class="") for call in calls] if row == WITHOUT_TASKS else calls


def compared(runs: Mapping[tuple[str, str], Report], seeds: Sequence[int]) -> Report:
    """For each line of the table, each figure over that of `WHOLE`, paired by seed. `runs` are the figures by trace and
    row."""

    def values(row: str, figure: str) -> list[float]:
        return [runs[f"{TRACE}/{seed}", row][figure] for seed in seeds]

    return {
        each.row: {
            figure: paired_difference.times_better(values(WHOLE, figure), values(each.row, figure))
            for figure in FIGURES
        }
        for each in TABLE
    }


def table(found: Report) -> str:
    """The table for a terminal."""
    header = (f"{TRACE}, over {WHOLE}", *FIGURES.values(), "the paper's row and figures")
    lines = [
        (each.row, *(bench_report.spread(found[each.row][figure], 2) for figure in FIGURES), each.paper)
        for each in TABLE
    ]
    return bench_report.table(header, lines)
