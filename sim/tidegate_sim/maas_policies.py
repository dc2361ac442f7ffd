"""How does each scheduling policy serve the traces of the suite `maas` when it never changes?

The rows are all policies that Tidegate has, with their default parameters. A policy that needs facts which these traces do
not have (workflows, relQueries, tools) falls back to what it does without them. The goodput is compared with that of
`REFERENCES`, seed by seed: the order of arrival, and the best of the fixed policies in the published table.
"""

from collections.abc import Mapping, Sequence

from tidegate_policy import policies
from tidegate_sim import bench_report, paired_difference
from tidegate_sim.bench_report import Report

REFERENCES = ("fcfs", "sjf")
ROWS = tuple(policies.POLICIES)
FIGURES = {"goodput": ("goodput, 1/s", 3), "attainment": ("targets met", 3), "esg": ("ESG", 3)}


def compared(runs: Mapping[tuple[str, str], Report], names: Sequence[str], seeds: Sequence[int]) -> Report:
    """By trace and policy: the figures, as means over `seeds`; and the goodput of all traces over that of each of
    `REFERENCES`. `runs` are the figures by trace (`NAME/SEED`) and row."""

    def totals(row: str) -> list[float]:
        """Calls a second that meet their targets, summed over the traces; by seed."""
        return [sum(runs[f"{name}/{seed}", row]["goodput"] for name in names) for seed in seeds]

    return {
        "traces": {
            name: {
                row: {
                    figure: paired_difference.interval([runs[f"{name}/{seed}", row][figure] for seed in seeds])
                    for figure in FIGURES
                }
                for row in ROWS
            }
            for name in names
        },
        "over": {
            other: {row: paired_difference.times_better(totals(other), totals(row)) for row in ROWS}
            for other in REFERENCES
        },
    }


def table(title: str, found: Report) -> str:
    """The policies for a terminal, best goodput first."""
    names = list(found["traces"])
    header = (
        title,
        *(f"{name}: {', '.join(heading for heading, _ in FIGURES.values())}" for name in names),
        *(f"goodput over {other}, paired" for other in REFERENCES),
    )
    best_first = sorted(ROWS, key=lambda row: -found["over"][REFERENCES[0]][row]["mean"])
    lines = [
        (
            row,
            *(
                " ".join(
                    f"{found['traces'][name][row][figure]['mean']:.{digits}f}"
                    for figure, (_, digits) in FIGURES.items()
                )
                for name in names
            ),
            *(bench_report.spread(found["over"][other][row], 3) for other in REFERENCES),
        )
        for row in best_first
    ]
    return bench_report.table(header, lines)
