"""The suite about the number of engines: met targets against GPU hours, on loads that change over an hour or two.

Fixed sizes at the mean and at the peak of the load, HorizontalPodAutoscalers by three metrics, and the product's autoscaler
set the engines of the same pool on the same traces. The *oracle* knows which calls will come and how long their answers
are, starts engines in time, and wants the engines that each minute needs by the capacity model of the product. It is a
reference and no bound: with a better model of the capacity, fewer engines may do.

A call counts in the minute of its arrival. A call that is shed misses its targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import tidegate_profiles
from tidegate_policy import cost, gateway_core
from tidegate_policy.admit import entitlements
from tidegate_policy.dispatch import waiting_limits
from tidegate_sim import (
    azure_suite,
    bench_report,
    cell,
    paired_difference,
    pools,
    scale_traces,
    scaled_cell,
    scalers,
    suite,
)
from tidegate_sim.bench_report import Report
from tidegate_sim.scalers import Task
from tidegate_sim.trace_format import TraceCall

POOL = "a100-40-llama2-70b-tp4"
RATE = 3.0
"""Calls a second: the base load. One engine serves about 1.4 of these calls a second at most."""
FIRST_SEED, SEEDS = 3901, 5
"""The seeds of the published table. No setting was chosen by them. A cell is hours of a trace, so there are five."""
DEVELOPMENT_SEEDS = range(1, 11)
"""The seeds by which settings were chosen."""
START_S = 120.0
"""From the request of an engine until it serves: a pod is scheduled and loads 140 GB of weights from a local cache."""
MOST_ENGINES = 12
OBJECTIVE = 0.95
PRICES: Mapping[str, float] = {"a100": 1.0, "l40": 0.5, "a6000": 0.4, "a5000": 0.25}
"""Relative prices of a GPU hour, by the beginning of a profile's name; assumed."""
OURS = "tidegate"
ORACLE = "oracle"
SCALERS: Mapping[str, scalers.Create] = {
    "static, mean": lambda task: scalers.Static(scalers.Need.of(task).mean()),
    "static, peak": lambda task: scalers.Static(scalers.Need.of(task).peak()),
    "HPA, GPU busy 80%": lambda task: scalers.Autoscalers(task, "busy", 0.8),
    "HPA, KV memory 80%": lambda task: scalers.Autoscalers(task, "kv", 0.8),
    "HPA, KV memory 60%": lambda task: scalers.Autoscalers(task, "kv", 0.6),
    "HPA, backlog 2 s": lambda task: scalers.Autoscalers(task, "backlog", 2.0),
    OURS: scalers.Tidegate,
    "tidegate, told of no targets": lambda task: scalers.Tidegate(task, learn=False),
    "tidegate, engines believed 1.3 times as fast": lambda task: scalers.Tidegate(task, believed=1.3),
    ORACLE: scalers.Oracle,
}
PARTS: Mapping[str, Sequence[str]] = {
    "main": ("static, mean", "static, peak", "HPA, KV memory 80%", "HPA, KV memory 60%", OURS, ORACLE),
    "further": tuple(name for name in SCALERS if "GPU" in name or "backlog" in name or name.startswith(f"{OURS}, ")),
}
"""The rows that `--parts` chooses: those that scale by what the load needs, and those that go to the bound of the pool or
leave out a part of the product. The row of the product is in both."""
SHOWN = {
    "attainment": ("targets met", 4),
    "worst": ("worst 5 min", 3),
    "gpu_hours": ("GPU hours", 2),
    "cost": ("cost", 2),
    "engines": ("engines", 2),
    "most_engines": ("most", 1),
    "changes_an_hour": ("changes/h", 1),
    "starts": ("starts", 1),
    "ttft_99_s": ("TTFT 99%, s", 2),
}
WORST_S = 300.0


class Autoscaling(azure_suite.AzureSuite):
    """The suite. A cell's trace is `NAME/SEED`."""

    name = "autoscaling"
    pools = (POOL,)
    rates = (RATE,)
    parts = tuple(PARTS)
    replayed = scale_traces.FROM_AZURE
    first_seed, seeds = FIRST_SEED, SEEDS

    @property
    def traces(self) -> Sequence[str]:
        return scale_traces.NAMES

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        """The gateway and the engines are the same in all rows."""
        settings = gateway_core.CoreSettings(
            classes=(entitlements.SloClass(name="chat"),),
            limits=waiting_limits.Limits(hold_s=3600.0),
        )
        return dict.fromkeys(SCALERS, cell.Row(gateway=settings))

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        name, seed = key.trace.split("/")
        return scale_traces.trace(name, int(seed), key.rate, azure_suite.published(key))

    def learned_from(self) -> Sequence[TraceCall]:
        return scale_traces.learned(1000)

    def run_row(self, key: suite.CellKey, row: cell.Row, learned_from: Sequence[TraceCall]) -> Report:
        calls, length_s = self.trace(key), scale_traces.length_s(key.trace.split("/")[0])
        task = _task(key.pool, calls, length_s)
        run = scaled_cell.ScaledCell(
            task.kinds,
            task.first,
            SCALERS[key.row](task),
            row,
            learned_from,
            seed=self.seed(key),
            length_s=length_s,
        )
        return _figures(calls, run.run(calls), run.bill(), length_s)

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        """All rows on all traces that are asked for. Without `--trace-file` the two traces from Azure are left out."""
        checks = suite.Checks(scheduler=options.scheduler)
        rows = [row for row in SCALERS if row == OURS or any(row in PARTS[part] for part in options.parts or PARTS)]
        named, seeds = self.chosen_traces(options), self.chosen_seeds(options)
        keys = self.seeded_keys(options, lambda _: rows)
        results = suite.run_cells(keys, options, checks, tell)
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "seeds": list(seeds),
            "settings": {"start_s": START_S, "most_engines": MOST_ENGINES, "objective": OBJECTIVE},
            "pools": [
                {
                    "pool": pool,
                    "rate": rate,
                    "traces": {name: _compared(results, pool, rate, name, seeds, rows) for name in named},
                }
                for pool, rates in self.loads(options).items()
                for rate in rates
            ],
        }

    def table(self, report: Report) -> str:
        parts = [
            _table(f"{name}: {found['pool']}, {found['rate']:g} calls/s", rows)
            for found in report["pools"]
            for name, rows in found["traces"].items()
        ]
        notes = (
            f"An engine serves {START_S:.0f} s after its request. Targets: first token in {scale_traces.TTFT_S:g} s, and "
            f"a token every {scale_traces.TPOT_S * 1000:.0f} ms on average.",
            f"Means over the seeds {report['seeds'][0]} to {report['seeds'][-1]}; differences are paired by seed, with 95% "
            "intervals (Student's t).",
            report["scheduler"]["sentence"],
        )
        return "\n\n".join([*parts, "\n".join(notes)])


SUITE = Autoscaling()


def _task(pool: str, calls: Sequence[TraceCall], length_s: float) -> Task:
    """The task of the scalers, with the engines that the first minutes need."""
    kinds = [_kind(profile) for profile in (pools.POOLS.get(pool) or pool.split(","))]
    task = Task(
        kinds=kinds,
        calls=calls,
        length_s=length_s,
        tpot_s=scale_traces.TPOT_S,
        objective=OBJECTIVE,
        first={},
    )
    early = scalers.Need.of(task).by_minute()[: round(WORST_S / scalers.Need.SLICE_S)]
    return replace(task, first={kind.name: max(each[kind.name] for each in early) for kind in kinds})


def _kind(profile: str) -> scaled_cell.EngineKind:
    found = tidegate_profiles.load(profile)
    return scaled_cell.EngineKind(
        name=profile,
        cost=cost.from_mapping(found["cost"]),
        gpus=int(found.get("tensor_parallel", 1)),
        gpu_price=next(price for start, price in PRICES.items() if profile.startswith(start)),
        start_s=START_S,
        high=MOST_ENGINES,
    )


def _figures(calls: Sequence[TraceCall], outcome: cell.Outcome, bill: scaled_cell.Bill, length_s: float) -> Report:
    """What is kept of one cell."""
    sent = {call.id: call for call in calls}
    met = {each.id: scaled_cell.meets_targets(sent[each.id], each) for each in outcome.calls}
    windows: dict[int, list[bool]] = {}
    for call in calls:
        windows.setdefault(int(call.arrival_s // WORST_S), []).append(met[call.id])
    ttfts_s = [each.ttft_s for each in outcome.calls if each.ttft_s is not None]
    hours = length_s / 3600
    return {
        "calls": len(calls),
        "attainment": fmean(met.values()),
        "worst": min(fmean(each) for each in windows.values() if len(each) >= 20),
        "shed": sum(each.shed is not None for each in outcome.calls),
        "ttft_99_s": bench_report.attained_s(ttfts_s, 0.99),
        "gpu_hours": bill.gpu_hours,
        "cost": bill.cost,
        "engines": bill.engines,
        "most_engines": bill.most_engines,
        "starts": bill.starts,
        "changes_an_hour": len(bill.changes) / hours,
    }


def _compared(
    results: Mapping[suite.CellKey, Report],
    pool: str,
    rate: float,
    name: str,
    seeds: Sequence[int],
    rows: Sequence[str],
) -> Report:
    """The figures of each row on a trace, and its differences from the product's row, seed by seed."""
    runs = {
        (key.row, key.trace): run
        for key, run in results.items()
        if (key.pool, key.rate) == (pool, rate) and key.trace.startswith(f"{name}/")
    }

    def values(row: str, key: str) -> list[float]:
        return [runs[row, f"{name}/{seed}"][key] for seed in seeds]

    return {
        row: {
            **{key: paired_difference.interval(values(row, key)) for key in SHOWN},
            "shed": sum(values(row, "shed")),
            "attainment_above_ours": paired_difference.difference(
                values(row, "attainment"), values(OURS, "attainment")
            ),
            "cost_times_ours": paired_difference.times_better(values(OURS, "cost"), values(row, "cost")),
        }
        for row in rows
    }


def _table(title: str, rows: Report) -> str:
    header = (
        title,
        *(heading for heading, _ in SHOWN.values()),
        "cost over tidegate's",
        "targets met above tidegate's",
    )
    lines = [
        (
            name,
            *(f"{row[key]['mean']:.{digits}f}" for key, (_, digits) in SHOWN.items()),
            bench_report.spread(row["cost_times_ours"], 2),
            bench_report.spread(row["attainment_above_ours"], 3),
        )
        for name, row in rows.items()
    ]
    return bench_report.table(header, lines)
