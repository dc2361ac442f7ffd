"""The base of the suites that compare rows under several loads: papers' sweeps, capacity, and sustained rates.

Each row runs on the same seeds, so differences between rows are paired. A run has four parts. `sweep` runs the paper's
loads. `capacity` measures the steady-state throughput of the best row under overload, and runs shares of it.
`sustained` finds by bisection the highest rate at which the targets are met. `sensitivity` runs further
rows, such as worse predictors, at one load of the first workload.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from tidegate_policy.cost import CostModel
from tidegate_policy.model import EngineId
from tidegate_sim import bench_report, cell, paired_difference, perception, pools, suite, sustained_rate
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import BadTrace, TraceCall

HALVINGS = 6
"""Steps of the bisection; the last interval is 1/64 of the first."""
PARTS = ("sweep", "capacity", "sustained")
SENSITIVITY = "sensitivity"
"""The part of the suites that have rows for it."""
CLAIRVOYANT = " (true lengths)"
"""The suffix of the rows that know every length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One set-up: a pool or an engine, a kind of trace, and the loads of the sweep."""

    pool: str
    """The pool, or the profile of its one engine."""
    rates: Sequence[float]
    """The paper's loads."""
    overload: float | None
    """A load far above what any row sustains, at which capacity is measured; None = the capacity is not measured."""
    count: int | None = None
    """Units of a trace; None = the suite's own number."""
    overload_count: int | None = None
    """Units of the trace that measures the capacity; None = as many as of the others."""
    published: bool = False
    """Whether its units are drawn from the data set of `--trace-file`."""
    max_batch: int | None = None
    """Calls that an engine runs at once; None = what its profile says."""


def clairvoyant(rows: Mapping[str, cell.Row]) -> dict[str, cell.Row]:
    """The same rows with true lengths and urgencies known."""
    return {f"{name}{CLAIRVOYANT}": replace(found, predictors=perception.CLAIRVOYANT) for name, found in rows.items()}


class LoadSuite(suite.Suite):
    """A suite of workloads, each under several loads. Its cells have the trace `WORKLOAD/SEED`."""

    parts: Sequence[str] = PARTS
    count: ClassVar[int]
    """Units (calls, groups, sessions or workflows) of a trace."""
    shares_of_capacity: ClassVar[Sequence[float]] = (0.5, 0.7, 0.9)
    """The loads of the part `capacity`."""
    sustained_targets: ClassVar[Mapping[str, tuple[str, float]]] = {"95%": ("slo_met", 0.95), "99%": ("slo_met", 0.99)}
    """Of each target of a sustained rate: the figure, and the least mean of it over the seeds."""
    sustained_rows: ClassVar[Sequence[str] | None] = None
    """The rows whose sustained rate is found; None = all."""
    capacity_rows: ClassVar[Sequence[str] | None] = None
    """The rows that measure the capacity; None = those of the sustained rates. Rows that finish cheap units first while the
    others pile up would measure too much."""
    headline: ClassVar[str]
    """The figure that the paper compares; smaller is better."""
    shown: ClassVar[Mapping[str, str]]
    """The figures of the table and their headings."""
    baselines: ClassVar[Sequence[str]]
    paper: ClassVar[Mapping[str, str]]
    """What the paper reports against a baseline."""
    notes: ClassVar[Sequence[str]] = ()
    """What is modelled and what is left out, one sentence each."""
    published_notes: ClassVar[Sequence[str]] = ()
    """Of the workloads that are drawn from a data set: what is measured and what is assumed."""

    @property
    @abstractmethod
    def workloads(self) -> Mapping[str, Workload]:
        """The set-ups by name."""

    @abstractmethod
    def calls(self, workload: str, rng: random.Random, rate: float, count: int) -> Sequence[TraceCall]:
        """A trace of `count` units, `rate` units a second."""

    def sampled(self, path: Path, rng: random.Random, rate: float, count: int, half: int) -> Sequence[TraceCall]:
        """A trace of `count` units, `rate` units a second, drawn from one half of the data set at `path`. The gateway has
        learned from half 0, and half 1 runs. Raises `BadTrace`, `OSError`."""
        raise BadTrace(f"the suite {self.name} reads no --trace-file")

    @property
    def sensitivity(self) -> Mapping[str, cell.Row]:
        """The rows of the part `SENSITIVITY`. `rows` has them too."""
        return {}

    @property
    def traces(self) -> Sequence[str]:
        return tuple(self.workloads)

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        workload, seed = key.trace.split("/")
        rng = random.Random(f"{self.name} {workload} {seed}")
        if key.trace_file is not None:
            return self.sampled(key.trace_file, rng, key.rate, key.workflows, half=1)
        return self.calls(workload, rng, key.rate, key.workflows)

    def engines(self, key: suite.CellKey) -> Mapping[EngineId, CostModel]:
        found = super().engines(key)
        most = self.workloads[key.trace.split("/")[0]].max_batch
        return found if most is None else {name: replace(model, max_batch=most) for name, model in found.items()}

    def learned_from(self) -> Sequence[TraceCall]:
        """A trace of the first workload with a seed that no cell runs."""
        return self.calls(next(iter(self.workloads)), random.Random(f"{self.name} learned"), 1.0, self.learned)

    def learned_from_file(self, path: Path) -> Sequence[TraceCall]:
        return self.sampled(path, random.Random(f"{self.name} learned"), 1.0, self.learned_published, half=0)

    learned_published: ClassVar[int] = 200
    """Units of the trace that the gateway has learned from before a data set runs."""
    learned: ClassVar[int] = 20
    """Units of the trace that the gateway has learned lengths from."""

    def seed(self, key: suite.CellKey) -> int:
        return int(key.trace.split("/")[1])

    def chosen_traces(self, options: suite.Options) -> Sequence[str]:
        """The workloads that are asked for. By default they are the published ones with `--trace-file`, and the others
        without. Raises `BadTrace` if a published one is asked for without a file, or if none reads the file."""
        published = [name for name, found in self.workloads.items() if found.published]
        if options.trace_file is not None and not set(published) & set(options.traces or published):
            raise BadTrace(
                f"no workload that is asked for reads --trace-file; those that do: {', '.join(published) or '-'}"
            )
        if options.trace_file is None and (needy := [name for name in options.traces or () if name in published]):
            raise BadTrace(f"the workload {needy[0]} needs --trace-file ({self.name} has others that need none)")
        default = published if options.trace_file else [name for name in self.workloads if name not in published]
        return [name for name in self.workloads if name in (options.traces or default)]

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        """The parts that `options` asks for, on its workloads."""
        checks = suite.Checks(scheduler=options.scheduler)
        chosen = {name: self.workloads[name] for name in self.chosen_traces(options)}
        parts = options.parts or (PARTS if options.policy else self.parts)
        rows = self._chosen_rows(options)
        sweep: list[Report] = []
        if "sweep" in parts:
            loads = {name: options.rates or found.rates for name, found in chosen.items()}
            sweep = self._cells(options, loads, rows, checks, tell)
        capacity: dict[str, float] = {}
        below: list[Report] = []
        if "capacity" in parts or "sustained" in parts:
            overloads = {name: [found.overload] for name, found in chosen.items() if found.overload}
            measured = self.capacity_rows or self.sustained_rows or self._main_rows
            candidates = [name for name in measured if not name.endswith(CLAIRVOYANT)]
            for over in self._cells(options, overloads, candidates, checks, tell):
                capacity[over["workload"]] = max(item["throughput"]["mean"] for item in over["rows"].values())
        if "capacity" in parts:
            loads = {
                name: [round(share * rate, 4) for share in self.shares_of_capacity] for name, rate in capacity.items()
            }
            below = self._cells(options, loads, rows, checks, tell)
        sustained = self._sustained(options, capacity, checks, tell) if "sustained" in parts else {}
        sensitivity: list[Report] = []
        if SENSITIVITY in parts:
            name, first = next(iter(chosen.items()))
            loads = {name: [max(options.rates or first.rates)]}
            sensitivity = self._cells(options, loads, list(self.sensitivity), checks, tell)
        if not checks.cells:
            raise BadTrace(
                f"{', '.join(chosen)}: no loads in {', '.join(parts)}; name some with --rates, or other --parts"
            )
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "settings": {
                "count": {name: options.workflows or found.count or self.count for name, found in chosen.items()},
                "seeds": list(self.chosen_seeds(options)),
                "rows": {name: asdict(self.row(name)) for name in (*self.rows, *rows)},
            },
            "notes": [*self.notes, *(self.published_notes if options.trace_file else ())],
            "profiles": pools.accuracy(found.pool for found in chosen.values()),
            "paper": dict(self.paper),
            "sweep": sweep,
            "capacity": capacity,
            "below_capacity": below,
            "sustained": sustained,
            "sensitivity": sensitivity,
        }

    def table(self, report: Report) -> str:
        """A table for each load, the sustained rates, the paper's figures, and the scheduler that ran."""
        parts = [
            self._load_table(found) for found in (*report["sweep"], *report["below_capacity"], *report["sensitivity"])
        ]
        if report["sustained"]:
            parts.append(self._sustained_table(report))
        parts.append("\n".join(f"Paper, {name}: {figure}" for name, figure in report["paper"].items()))
        seeds = len(report["settings"]["seeds"])
        intervals = (
            f"Brackets hold 95% intervals (Student's t) over {seeds} seeds; with few seeds they may pass what is possible."
            if seeds >= paired_difference.FEWEST
            else f"An interval needs {paired_difference.FEWEST} seeds."
        )
        better = "`times better` is the geometric mean of the ratio to a baseline, seed by seed."
        parts.append(f"{intervals} {better}")
        parts.append("\n".join((*report["notes"], *report["profiles"])))
        parts.append(report["scheduler"]["sentence"])
        return "\n\n".join(part for part in parts if part)

    def load_name(self, workload: str, rate: float) -> str:
        """What the rate of a cell is, for a table."""
        return f"{rate:g}/s"

    @property
    def _main_rows(self) -> list[str]:
        return [name for name in self.rows if name not in self.sensitivity]

    def _chosen_rows(self, options: suite.Options) -> list[str]:
        """The rows of all parts but `SENSITIVITY`. The row of a policy has the policy's name."""
        return [*dict.fromkeys((*self.baselines, *options.policy))] if options.policy else self._main_rows

    def _keys(
        self, options: suite.Options, workload: str, rate: float, rows: Sequence[str]
    ) -> dict[str, list[suite.CellKey]]:
        found = self.workloads[workload]
        own = found.count or self.count
        count = options.workflows or own
        if rate == found.overload and found.overload_count:
            count = round(found.overload_count * count / own)
        return {
            name: [
                suite.CellKey(
                    suite=self.name,
                    pool=found.pool,
                    row=name,
                    trace=f"{workload}/{seed}",
                    rate=rate,
                    workflows=count,
                    scheduler=options.scheduler,
                    trace_file=options.trace_file if found.published else None,
                )
                for seed in self.chosen_seeds(options)
            ]
            for name in rows
        }

    def _cells(
        self,
        options: suite.Options,
        loads: Mapping[str, Sequence[float]],
        rows: Sequence[str],
        checks: suite.Checks,
        tell: suite.Tell,
    ) -> list[Report]:
        keys = {
            (workload, rate): self._keys(options, workload, rate, rows)
            for workload, rates in loads.items()
            for rate in rates
        }
        every = [key for by_row in keys.values() for of_row in by_row.values() for key in of_row]
        results = suite.run_cells(every, options, checks, tell)
        return [
            self._load(workload, rate, {name: [results[key] for key in of_row] for name, of_row in by_row.items()})
            for (workload, rate), by_row in keys.items()
        ]

    def _load(self, workload: str, rate: float, runs: Mapping[str, Sequence[Report]]) -> Report:
        """One load: each row's figures with intervals, and its paired comparison with each baseline."""
        head = {name: [max(run[self.headline], 1e-6) for run in of_row] for name, of_row in runs.items()}
        rows: dict[str, Report] = {}
        for name, of_row in runs.items():
            rows[name] = {key: paired_difference.interval([run[key] for run in of_row]) for key in of_row[0]}
            rows[name]["times_better"] = {
                other: paired_difference.times_better(head[name], head[other])
                for other in self.baselines
                if other in head and other != name
            }
            known = f"{name}{CLAIRVOYANT}"
            if known in head:
                rows[name]["share_of_clairvoyant"] = paired_difference.times_better(head[name], head[known])
        return {"workload": workload, "pool": self.workloads[workload].pool, "rate": rate, "rows": rows}

    def _sustained(
        self, options: suite.Options, capacity: Mapping[str, float], checks: suite.Checks, tell: suite.Tell
    ) -> Report:
        """The highest rate at which each row meets a share of its targets, over all seeds together."""
        found: Report = {workload: {} for workload in capacity}
        for workload, most in capacity.items():
            for target, (figure, share) in self.sustained_targets.items():

                def met(
                    rates: Mapping[str, float], workload: str = workload, figure: str = figure, share: float = share
                ) -> dict[str, bool]:
                    keys = {name: self._keys(options, workload, rate, [name])[name] for name, rate in rates.items()}
                    every = [key for of_row in keys.values() for key in of_row]
                    results = suite.run_cells(every, options, checks, tell)
                    return {
                        name: fmean(results[key][figure] for key in of_row) >= share for name, of_row in keys.items()
                    }

                rows = self._chosen_rows(options) if options.policy else self.sustained_rows or self._main_rows
                bounds = dict.fromkeys(rows, (0.0, 1.2 * most))
                found[workload][target] = sustained_rate.search(bounds, HALVINGS, met)
        return found

    def _load_table(self, found: Report) -> str:
        against = [name for name in self.baselines if name in found["rows"]]
        header = (
            f"{found['workload']}, {self.load_name(found['workload'], found['rate'])}",
            *self.shown.values(),
            *(f"times better than {name}" for name in against),
        )
        lines = []
        for name, figures in found["rows"].items():
            better = [figures["times_better"].get(other) for other in against]
            lines.append(
                (
                    name,
                    *(bench_report.spread(figures[key], 3) for key in self.shown),
                    *("-" if item is None else bench_report.spread(item, 2) for item in better),
                )
            )
        text = bench_report.table(header, lines)
        shares = [
            f"{name}: {figures['share_of_clairvoyant']['mean']:.0%} of the result with true lengths known"
            for name, figures in found["rows"].items()
            if "share_of_clairvoyant" in figures
        ]
        return "\n".join([text, *shares])

    def _sustained_table(self, report: Report) -> str:
        parts = []
        for workload, by_share in report["sustained"].items():
            header = (f"{workload}: sustained rate, 1/s", *(f"targets met: {share}" for share in by_share))
            names = next(iter(by_share.values()))
            lines = [(name, *(f"{rates[name]:.3f}" for rates in by_share.values())) for name in names]
            parts.append(bench_report.table(header, lines))
        return "\n\n".join(parts)


def steady_throughput(finished_s: Sequence[float]) -> float:
    """Units a second between the first and the third quarter of the completions. This leaves out the start and the end of a
    trace, in which the engine is not full."""
    ordered = sorted(finished_s)
    low, high = len(ordered) // 4, 3 * len(ordered) // 4
    if high <= low or ordered[high] <= ordered[low]:
        return len(ordered) / max(ordered[-1], 1e-9)
    return (high - low) / (ordered[high] - ordered[low])
