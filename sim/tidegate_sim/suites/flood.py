"""The suite about floods: what do tenants lose while another one sends fifty times its share?

Four tenants send single calls to a pool. Each sends a quarter of the load. In the second trace of a seed the last tenant
sends `FLOOD` times as many for `FLOOD_S` seconds, and the calls of the others are the same. Every call has a target for its
first token and one for each later token. The figures are the latencies and the attainment (the share of the calls that meet
both targets, H-MAS eq 8) of the other tenants' calls that arrive from the beginning of the flood on.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from tidegate_policy import gateway_core
from tidegate_policy.dispatch import waiting_limits
from tidegate_sim import bench_report, cell, paired_difference, scaled_cell, suite
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

TENANTS, FLOODER = ("ant", "bee", "cat"), "flood"
FLOOD, FLOOD_FROM_S, FLOOD_S = 50, 60.0, 40.0
QUIET_S = 60.0
"""Seconds after the flood that are counted too, because its calls still wait then."""
FIRST_SEED = 801
PROMPT, OUTPUT = (200, 1200), (40, 240)
"""Ranges of tokens."""
TTFT_S, TPOT_S = 1.0, 0.075
"""The targets of every call. They are tight: in a quiet run the slowest calls miss them, so any further delay shows."""
FIGURES = {"p95_s": 0.95, "p50_s": 0.5}
GOAL = 0.1
"""The part of their attainment that the other tenants may lose at most."""


def _row(*, shares: bool) -> cell.Row:
    return cell.Row(gateway=gateway_core.CoreSettings(limits=waiting_limits.Limits(share_among_tenants=shares)))


ROWS: Mapping[str, cell.Row] = {"shares by tenant": _row(shares=True), "no shares": _row(shares=False)}


class Flood(suite.Suite):
    """The suite."""

    name = "flood"
    pools = ("hetero-1",)
    rates = (6.0,)
    """Calls a second of all tenants together."""
    first_seed = FIRST_SEED

    @property
    def traces(self) -> Sequence[str]:
        return self.chosen_traces(suite.Options())

    def chosen_traces(self, options: suite.Options) -> Sequence[str]:
        return options.traces or tuple(
            f"{seed}{kind}" for seed in self.chosen_seeds(options) for kind in ("", "-flood")
        )

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return ROWS

    def trace(self, key: suite.CellKey) -> Sequence[TraceCall]:
        return trace(key.trace, key.rate)

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        sent = {call.id: call for call in self.trace(key)}
        counted = [
            call
            for call in outcome.calls
            if call.tenant in TENANTS and FLOOD_FROM_S <= call.arrived_at_s <= FLOOD_FROM_S + FLOOD_S + QUIET_S
        ]
        latencies_s = [call.e2e_s for call in counted if call.e2e_s is not None]
        return {
            **{name: bench_report.attained_s(latencies_s, share) for name, share in FIGURES.items()},
            "counted": len(counted),
            "attainment": fmean(scaled_cell.meets_targets(sent[call.id], call) for call in counted),
            "shed_of_others": sum(call.shed is not None for call in outcome.calls if call.tenant in TENANTS),
        }

    def run(self, options: suite.Options, tell: suite.Tell) -> Report:
        checks = suite.Checks(scheduler=options.scheduler)
        results = suite.run_cells(self.keys(options, self.loads(options)), options, checks, tell)
        return {
            "suite": self.name,
            "scheduler": checks.report(),
            "traces": list(self.chosen_traces(options)),
            "cells": [
                {"pool": pool, "rate": rate, "row": row, **compared(results, pool, rate, row)}
                for pool, rates in self.loads(options).items()
                for rate in rates
                for row in ROWS
            ],
        }

    def table(self, report: Report) -> str:
        header = (
            "pool, load, row",
            "p95 s: quiet, flood, change",
            "median s: quiet, flood, change",
            "targets met: quiet, flood, part lost",
        )
        rows = []
        for found in report["cells"]:
            cells = []
            for key in FIGURES:
                change = bench_report.change(found["change"][key])
                cells.append(f"{found['quiet'][key]:.1f} {found['flood'][key]:.1f} {change}")
            attained = [f"{found[when]['attainment']:.1%}" for when in ("quiet", "flood")]
            cells.append(" ".join([*attained, bench_report.share(found["lost"])]))
            rows.append((f"{found['pool']}, {found['rate']:g} calls/s, {found['row']}", *cells))
        return "\n\n".join(
            [
                f"Latency and attainment of the other tenants while one sends {FLOOD} times its share. Intervals are "
                f"paired by seed. Targets: {TTFT_S:g} s for the first token, {TPOT_S:g} s for each later one. The goal is "
                f"a loss of less than {GOAL:.0%}.",
                bench_report.table(header, rows),
                report["scheduler"]["sentence"],
            ]
        )


SUITE = Flood()


def trace(name: str, rate: float) -> list[TraceCall]:
    """The calls of a trace. Those of the quiet tenants depend on the seed alone."""
    seed, _, flooded = name.partition("-")
    end_s = FLOOD_FROM_S + FLOOD_S + QUIET_S
    calls: list[TraceCall] = []
    for tenant in (*TENANTS, FLOODER):
        calls += _calls(random.Random(f"{seed} {tenant}"), tenant, rate / 4, 0.0, end_s)
    if flooded:
        more = _calls(random.Random(f"{seed} more"), FLOODER, (FLOOD - 1) * rate / 4, FLOOD_FROM_S, FLOOD_S)
        calls += [replace(call, id=f"more-{call.id}") for call in more]
    return sorted(calls, key=lambda call: call.arrival_s)


def _calls(rng: random.Random, tenant: str, rate: float, from_s: float, for_s: float) -> list[TraceCall]:
    calls: list[TraceCall] = []
    at_s = from_s + rng.expovariate(rate)
    while at_s < from_s + for_s:
        calls.append(
            TraceCall(
                id=f"{tenant}-{len(calls)}",
                arrival_s=at_s,
                prompt_tokens=rng.randint(*PROMPT),
                output_tokens=rng.randint(*OUTPUT),
                tenant=tenant,
                ttft_slo_ms=TTFT_S * 1000,
                tpot_slo_ms=TPOT_S * 1000,
            )
        )
        at_s += rng.expovariate(rate)
    return calls


def lost(before: float, after: float) -> float:
    """The part of an attainment that is lost; 0 where there was none to lose."""
    return 1 - after / before if before else 0.0


def compared(results: Mapping[suite.CellKey, Report], pool: str, rate: float, row: str) -> Report:
    runs = {key.trace: run for key, run in results.items() if (key.pool, key.rate, key.row) == (pool, rate, row)}
    quiet = [run for name, run in runs.items() if not name.endswith("-flood")]
    flood = [runs[f"{name}-flood"] for name in runs if not name.endswith("-flood")]
    means = (*FIGURES, "attainment")
    return {
        "quiet": {key: fmean(run[key] for run in quiet) for key in means},
        "flood": {key: fmean(run[key] for run in flood) for key in means},
        "lost": paired_difference.interval(
            [lost(before["attainment"], after["attainment"]) for before, after in zip(quiet, flood, strict=True)]
        ),
        "change": {
            key: paired_difference.times_better([run[key] for run in quiet], [run[key] for run in flood])
            for key in FIGURES
        },
        "shed_of_others": sum(run["shed_of_others"] for run in flood),
    }
