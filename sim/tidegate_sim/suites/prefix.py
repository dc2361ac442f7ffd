"""The suite about prefixes: which dispatch rule makes the most of KV caches, on two pools of unequal engines?

A trace is named `WORKLOAD-POOL`. The text-to-SQL workloads share 0, 50 or 80% of the prompts about one database; the data
shows no text, so the share and the number of databases are assumptions. `mooncake` is the published conversation trace
with its block hashes, cut into slices and stretched to each rate; `--trace-file` names it. For each row and seed (or slice)
a bisection finds the highest rate at which 95% of the workflows (or calls) end within 3 and 5 times their time on an
unloaded pool without caches (`slowdown`). With `--rates` the rows run at these rates instead, and their latencies are
compared. Rows are compared seed by seed. The first third of each trace fills the caches and is not counted.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from tidegate_policy import gateway_core, policies
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_sim import (
    bench_report,
    cell,
    engine_limits,
    gateway_rows,
    mooncake_trace,
    paired_difference,
    pools,
    slowdown,
    suite,
    sustained_rate,
    text2sql_workflows,
)
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import BadTrace, TraceCall

WLR, AFFINITY, CACHE_AWARE, PREFIX_SCORE, OURS = (
    "weighted least requests + FCFS",
    "bounded affinity + FCFS",
    "cache-aware + FCFS",
    "prefix-score + FCFS",
    "least delay + urgency",
)
BASELINES = (WLR, AFFINITY, CACHE_AWARE, PREFIX_SCORE)
TARGETS = {"3x": 3.0, "5x": 5.0}
"""The slowdown within which a workflow or call should end."""
SHARE_MET = 0.95
WARM_UP = 1 / 3
HALVINGS = 6
"""Steps of a bisection. The bounds of text2sql are at most a factor of 16 apart and those of mooncake 50, so rates are
found to 4.5% and 6.5%."""
FIRST_SEED = 401
"""Seeds were fixed before the first run of the suite."""


def _ours(policy: str = policies.DEFAULT, prefix_entries: int | None = None) -> cell.Row:
    dispatch = DispatchSettings()
    if prefix_entries is not None:
        dispatch = replace(dispatch, prefix_entries=prefix_entries)
    return cell.Row(gateway=gateway_core.CoreSettings(policy=policy, dispatch=dispatch))


ROWS_OF: Mapping[str, Mapping[str, cell.Row]] = {
    "rules": {
        WLR: gateway_rows.router("weighted-least-requests"),
        AFFINITY: gateway_rows.router("bounded-affinity"),
        OURS: _ours(),
    },
    "routers": {
        CACHE_AWARE: gateway_rows.router("cache-aware"),
        PREFIX_SCORE: gateway_rows.router("prefix-score"),
    },
    "ablations": {
        "least delay + urgency, prefixes unknown": _ours(prefix_entries=0),
        "least delay + FCFS": _ours("fcfs"),
    },
    "weak": {
        "RR + FCFS": gateway_rows.router("round-robin"),
        "least requests + FCFS": gateway_rows.router("least-requests"),
        "power of two + FCFS": gateway_rows.router("power-of-two"),
    },
}
"""The rows of each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of trace."""

    count: int
    """Workflows or calls of one trace, those of the warm-up included."""
    rates: tuple[float, float]
    """The bounds of the bisection, in workflows or calls a second."""
    shared: text2sql_workflows.SharedPrefix | None = None
    """None = the Mooncake trace."""


def _text2sql(share: float, databases: int, *rates: float) -> Workload:
    shared = text2sql_workflows.SharedPrefix(share=share, databases=databases)
    return Workload(count=90, rates=(rates[0], rates[1]), shared=shared)


WORKLOADS: Mapping[str, Workload] = {
    "text2sql-0": _text2sql(0.0, 95, 0.03, 0.45),
    "text2sql-50": _text2sql(0.5, 95, 0.04, 0.6),
    "text2sql-80": _text2sql(0.8, 95, 0.05, 0.8),
    "text2sql-80-of-11": _text2sql(0.8, 11, 0.06, 0.9),
    "mooncake": Workload(count=900, rates=(0.02, 1.0)),
}
POOLS = ("hetero-1", "hetero-2")


class Prefix(suite.Suite):
    """The suite. `seeds` is the number of seeds, or of slices of the Mooncake trace."""

    name = "prefix"
    pools = POOLS
    parts = tuple(ROWS_OF)
    seeds = 5
    """A bisection runs six cells for each seed, target and row, and the published trace has few slices."""
    first_seed = FIRST_SEED

    @property
    def traces(self) -> Sequence[str]:
        return tuple(f"{workload}-{pool}" for workload in WORKLOADS for pool in POOLS)

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return {name: row for rows in ROWS_OF.values() for name, row in rows.items()}

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        workload, seed = _parsed(key.trace)
        shared = WORKLOADS[workload].shared
        if shared is None:
            if key.trace_file is None:
                raise BadTrace(f"the trace {key.trace} needs --trace-file, the Mooncake conversation trace")
            return _slice(_mooncake(key.trace_file), seed - FIRST_SEED, key.workflows, key.rate)
        return text2sql_workflows.trace(
            random.Random(seed),
            text2sql_workflows.BOTH,
            workflows=key.workflows,
            rate=key.rate,
            name=f"seed{seed}",
            shared=shared,
        )

    def learned_from(self) -> Sequence[TraceCall]:
        return text2sql_workflows.learned()

    def seed(self, key: suite.CellKey) -> int:
        return _parsed(key.trace)[1]

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """The shares of the counted workflows or calls that end within each target, and their latencies."""
        slowdowns = slowdown.of_outcome(self.trace(key), outcome, list(pools.pool(key.pool).values()))
        counted = slowdowns[round(WARM_UP * len(slowdowns)) :]
        met = {name: sum(each.slowdown <= most for each in counted) / len(counted) for name, most in TARGETS.items()}
        latencies_s = [each.latency_s for each in counted]
        return {
            **met,
            "mean_s": fmean(latencies_s),
            "p95_s": bench_report.attained_s(latencies_s, SHARE_MET),
            "mean_slowdown": fmean(each.slowdown for each in counted),
            "calls_on": dict(outcome.calls_on),
        }

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        """For each trace the bisections of all rows of the chosen parts, or their latencies at the given rates."""
        checks = suite.Checks(scheduler=options.scheduler)
        rows = [name for part in options.parts or self.parts for name in ROWS_OF[part]]
        if WLR not in rows:
            rows.insert(0, WLR)
        chosen = options.traces or [name for name in self.traces if options.trace_file or "mooncake" not in name]
        cells = _Cells(options, rows, list(self.chosen_seeds(options)), checks, tell)
        return {
            "suite": self.name,
            "seeds": list(cells.seeds),
            "rows": rows,
            "notes": _notes(options),
            "traces": {} if options.rates else {name: _sustained(name, cells) for name in chosen},
            "latencies": {
                name: {str(rate): _latencies(name, rate, cells) for rate in options.rates or ()} for name in chosen
            },
            "scheduler": checks.report(),
        }

    def table(self, report: Report) -> str:
        """For each trace a table of sustained rates, or of latencies."""
        parts = [_table(name, found) for name, found in report["traces"].items()]
        parts += [
            _latency_table(name, rate, found)
            for name, by_rate in report["latencies"].items()
            for rate, found in by_rate.items()
        ]
        return "\n\n".join([*parts, "\n".join(report["notes"]), report["scheduler"]["sentence"]])


SUITE = Prefix()


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one run."""

    options: suite.Options
    rows: Sequence[str]
    seeds: Sequence[int]
    checks: suite.Checks
    tell: suite.Tell

    def key(self, trace: str, row: str, seed: int, rate: float) -> suite.CellKey:
        workload, pool = _split(trace)
        return suite.CellKey(
            suite=Prefix.name,
            pool=pool,
            row=row,
            trace=f"{workload}/{seed}",
            rate=rate,
            workflows=self.options.workflows or WORKLOADS[workload].count,
            scheduler=self.options.scheduler,
            trace_file=self.options.trace_file,
        )

    def run(self, keys: Sequence[suite.CellKey]) -> dict[suite.CellKey, Report]:
        return suite.run_cells(keys, self.options, self.checks, self.tell)


def _sustained(trace: str, cells: _Cells) -> Report:
    """Of each target the highest rates of all rows."""
    known: dict[suite.CellKey, Report] = {}

    def met(rates: Mapping[tuple[str, int, str], float]) -> Mapping[tuple[str, int, str], bool]:
        keys = {name: cells.key(trace, name[0], name[1], rate) for name, rate in rates.items()}
        known.update(cells.run([found for found in dict.fromkeys(keys.values()) if found not in known]))
        return {name: known[found][name[2]] >= SHARE_MET for name, found in keys.items()}

    names = [(row, seed, target) for row in cells.rows for seed in cells.seeds for target in TARGETS]
    bounds = WORKLOADS[_split(trace)[0]].rates
    found = sustained_rate.search(dict.fromkeys(names, bounds), HALVINGS, met)
    rates = {
        target: {row: [found[row, seed, target] for seed in cells.seeds] for row in cells.rows} for target in TARGETS
    }
    return {target: _compared(by_row, bounds) for target, by_row in rates.items()}


def _latencies(trace: str, rate: float, cells: _Cells) -> Report:
    """Of each row its latencies at `rate`, and by which factor its mean is shorter than that of each baseline."""
    keys = {row: [cells.key(trace, row, seed, rate) for seed in cells.seeds] for row in cells.rows}
    figures = cells.run([key for of_row in keys.values() for key in of_row])
    means_s = {row: [figures[key]["mean_s"] for key in of_row] for row, of_row in keys.items()}
    return {
        row: {
            **{
                name: paired_difference.interval([figures[key][name] for key in of_row])
                for name in ("mean_s", "p95_s", *TARGETS)
            },
            "times": {
                other: paired_difference.times_better(means_s[row], means_s[other])
                for other in BASELINES
                if other in means_s
            },
        }
        for row, of_row in keys.items()
    }


def _compared(rates: Mapping[str, Sequence[float]], bounds: tuple[float, float]) -> Report:
    """Each row's rate with its interval, and how many times the rate of each baseline it sustains, seed by seed.

    `clipped` are the seeds whose rate is one of the bounds of the search, to its precision: the true rate may be beyond."""
    lowest, highest = sustained_rate.extremes(bounds, HALVINGS)
    return {
        row: {
            "rates": list(of_seeds),
            "rate": paired_difference.interval(of_seeds),
            "clipped": {
                "below": sum(rate <= lowest for rate in of_seeds),
                "above": sum(rate >= highest for rate in of_seeds),
            },
            "times": {
                other: paired_difference.times_better(rates[other], of_seeds) for other in BASELINES if other in rates
            },
        }
        for row, of_seeds in rates.items()
    }


def _table(trace: str, found: Report) -> str:
    unit = "calls" if trace.startswith("mooncake") else "workflows"
    against = [name for name in BASELINES if name in next(iter(found.values()))]
    parts = []
    for target, rows in found.items():
        header = (
            f"{trace}: {unit}/s, {SHARE_MET:.0%} within {target}",
            "rate",
            *(f"times {name.removesuffix(' + FCFS')}" for name in against),
        )
        lines = [
            (
                name,
                bench_report.spread(row["rate"], 3),
                *("-" if other == name else bench_report.spread(row["times"][other], 2) for other in against),
            )
            for name, row in rows.items()
        ]
        clipped = [
            f"{name}: {row['clipped']['below']} seeds at the lowest rate of the search, "
            f"{row['clipped']['above']} at the highest"
            for name, row in rows.items()
            if any(row["clipped"].values())
        ]
        parts.append("\n".join([bench_report.table(header, lines), *clipped]))
    return "\n\n".join(parts)


def _latency_table(trace: str, rate: str, rows: Report) -> str:
    against = [name for name in BASELINES if name in rows]
    header = (
        f"{trace}, {rate}/s",
        "mean, s",
        f"{SHARE_MET:.0%}, s",
        *(f"within {target}" for target in TARGETS),
        *(f"mean: times better than {name.removesuffix(' + FCFS')}" for name in against),
    )
    lines = [
        (
            name,
            *(bench_report.spread(row[key], 1) for key in ("mean_s", "p95_s")),
            *(bench_report.spread(row[target], 2) for target in TARGETS),
            *("-" if other == name else bench_report.spread(row["times"][other], 2) for other in against),
        )
        for name, row in rows.items()
    ]
    return bench_report.table(header, lines)


def _notes(options: suite.Options) -> list[str]:
    notes = [
        f"Intervals are 95% (Student's t) over seeds or slices. A bisection has {HALVINGS} steps. The first third of each "
        "trace is not counted.",
        "The shared prefix of text2sql and the number of databases are assumptions; the data shows no text.",
    ]
    if options.trace_file:
        notes.append(f"Mooncake calls beyond {engine_limits.MAX_MODEL_LEN} tokens are left out.")
    return notes


def _split(trace: str) -> tuple[str, str]:
    """Workload and pool of `WORKLOAD-POOL`."""
    pool = next(name for name in POOLS if trace.endswith(f"-{name}"))
    return trace.removesuffix(f"-{pool}"), pool


def _parsed(trace: str) -> tuple[str, int]:
    """Workload and seed of a cell's `WORKLOAD/SEED`."""
    workload, seed = trace.split("/")
    return workload, int(seed)


@functools.lru_cache(maxsize=2)
def _mooncake(path: Path) -> Sequence[TraceCall]:
    return [
        call
        for call in mooncake_trace.read(path)
        if call.prompt_tokens + call.output_tokens <= engine_limits.MAX_MODEL_LEN
    ]


def _slice(calls: Sequence[TraceCall], number: int, count: int, rate: float) -> Sequence[TraceCall]:
    """`count` calls in a row, the whole trace being cut evenly, stretched or shrunk to `rate` calls a second."""
    slices = max(len(calls) // count, 1)
    taken = calls[number % slices * count :][:count]
    if not taken:
        raise BadTrace("the trace holds no calls that fit an engine")
    first_s = taken[0].arrival_s
    factor = len(taken) / rate / max(taken[-1].arrival_s - first_s, 1e-3)
    return [replace(call, arrival_s=(call.arrival_s - first_s) * factor) for call in taken]
