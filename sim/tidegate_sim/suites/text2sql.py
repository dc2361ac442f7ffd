"""The text-to-SQL suite: agentic workflows on two pools of unequal engines (HexGen-Text2SQL, section 5).

Rows differ in the dispatch rule and in the scheduling policy. One setting of each method serves all cells. Lengths and
remaining work are learned from a trace that no cell runs. The workloads `financial`, `formula1` and `both` are the
paper's traces under the paper's loads, which are far above what the pools can sustain. The workload `steady` asks both
databases, is long enough for a steady state, and leaves its first third out of the figures.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import ClassVar

from tidegate_policy import gateway_core, policies
from tidegate_policy.dispatch import waiting_limits
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_sim import bench_report, cell, gateway_rows, load_suite, pools, slowdown, suite, text2sql_workflows
from tidegate_sim.bench_report import Report
from tidegate_sim.trace_format import TraceCall

DATABASES: Mapping[str, Sequence[text2sql_workflows.Database]] = {
    "financial": (text2sql_workflows.FINANCIAL,),
    "formula1": (text2sql_workflows.FORMULA1,),
    "both": text2sql_workflows.BOTH,
    "steady": text2sql_workflows.BOTH,
}
"""The paper's three traces (one database each, and both), and the trace of the loads around the capacity."""
STEADY = "steady"
STEADY_WORKFLOWS = 60
WARM_UP = 1 / 3
"""The share of the first workflows of `steady` that no figure counts."""
RATES = (0.5, 1.0)
"""The paper's loads, in workflows a second."""
SATURATED, SATURATED_WORKFLOWS = 1000.0, 160
"""The load that stands for a closed loop, and its workflows. In an open overload the workflows that pile up would end
together at last, and their rate would be that of no load that the pool sustains."""
ACTIVE = 32
"""Workflows that are active in the closed loop."""
WITHIN = {"within_3x": 3.0, "within_5x": 5.0}
"""How many times its time on the unloaded pool a workflow may take."""

WLR, PAPERS_BASELINE, LEAST_REQUESTS = "WLR + FCFS", "RR + FCFS", "least requests + FCFS"
HEXGEN, OURS = "score + urgency", "least delay + urgency"
"""The paper's method, and the product's default."""


def _row(rule: str = DispatchSettings().rule, policy: str = policies.DEFAULT) -> cell.Row:
    return cell.Row(gateway=gateway_core.CoreSettings(policy=policy, dispatch=DispatchSettings(rule=rule)))


def _with_gateway(row: cell.Row, **more: object) -> cell.Row:
    return replace(row, gateway=replace(row.gateway, **more))  # type: ignore[arg-type]  # fields of CoreSettings


def _rows() -> dict[str, cell.Row]:
    ours = _row()
    unfiltered = replace(ours.gateway.dispatch, deadline_filter=False)
    return {
        PAPERS_BASELINE: gateway_rows.router("round-robin"),
        LEAST_REQUESTS: gateway_rows.router("least-requests"),
        "power of two + FCFS": gateway_rows.router("power-of-two"),
        WLR: gateway_rows.router("weighted-least-requests"),
        "RR + urgency": gateway_rows.router("round-robin", "urgency"),
        "score + FCFS": gateway_rows.router("score"),
        HEXGEN: gateway_rows.router("score", "urgency"),
        OURS: ours,
        "ours, FCFS": _row(policy="fcfs"),
        "ours, without the delay to others": _row("earliest-finish"),
        "ours, without the deadline filter": _with_gateway(ours, dispatch=unfiltered),
        "ours, without a cap": _with_gateway(ours, max_inflight=None),
        "ours, without the bound on workflows": _with_gateway(
            ours, limits=waiting_limits.Limits(bound_workflows=False)
        ),
        "ours, nothing learned before": replace(ours, learn=False),
        "ours, costs learned": _with_gateway(ours, learn_costs=True),
        "ours, costs 20% wrong": replace(ours, profiles="wrong-20"),
        "ours, costs 40% wrong": replace(ours, profiles="wrong-40"),
        "ours, costs 40% wrong at the start, learned": replace(
            _with_gateway(ours, learn_costs=True), profiles="wrong-40"
        ),
        **load_suite.clairvoyant({OURS: ours}),
    }


class Text2Sql(load_suite.LoadSuite):
    """The suite. A unit is a workflow."""

    name = "text2sql"
    count = 32
    first_seed = 5001
    headline = "deadline_95_s"
    shown: ClassVar[Mapping[str, str]] = {
        "deadline_95_s": "deadline at 95%, s",
        "deadline_99_s": "at 99%, s",
        "mean_s": "mean, s",
        "within_3x": "within 3x",
        "throughput": "throughput, 1/s",
        "queued_share": "calls queued in an engine",
    }
    shares_of_capacity = (0.5, 0.7, 0.9, 1.1)
    sustained_targets: ClassVar[Mapping[str, tuple[str, float]]] = {
        "95% within 3x": ("within_3x", 0.95),
        "95% within 5x": ("within_5x", 0.95),
    }
    sustained_rows = (LEAST_REQUESTS, WLR, HEXGEN, OURS, f"{OURS}{load_suite.CLAIRVOYANT}")
    baselines = (WLR, LEAST_REQUESTS, PAPERS_BASELINE)
    paper: ClassVar[Mapping[str, str]] = {
        "score + urgency against RR + FCFS": "deadline at 95% 1.67 / 1.41 times shorter (best / mean of cells), at 99% "
        "1.60 / 1.35, throughput 1.75 / 1.65 times as high",
        "score + urgency against RR + urgency": "deadline at 95% 1.38 / 1.18, at 99% 1.40 / 1.24",
        "score + urgency against score + FCFS": "deadline at 95% 1.50 / 1.20, at 99% 1.40 / 1.20",
    }
    notes = (
        "Steps and KV capacity are modelled by profiles, lengths by generators. There is no network and no SQL execution.",
        "The paper's loads are far above capacity, so their figures grow with the length of the trace, 32 workflows.",
        f"The workload steady has {STEADY_WORKFLOWS} workflows unless --workflows gives another number; the first third of "
        "them is not counted. 3x and 5x are multiples of a workflow's time on the unloaded pool.",
        "No prompts share a prefix; the suite prefix has the sweep of 0, 50 and 80%.",
    )

    @property
    def workloads(self) -> Mapping[str, load_suite.Workload]:
        papers = {
            f"{trace}-{pool}": load_suite.Workload(pool=pool, rates=RATES, overload=None)
            for trace in DATABASES
            if trace != STEADY
            for pool in pools.POOLS
        }
        steady = {
            f"{STEADY}-{pool}": load_suite.Workload(
                pool=pool, rates=(), overload=SATURATED, count=STEADY_WORKFLOWS, overload_count=SATURATED_WORKFLOWS
            )
            for pool in pools.POOLS
        }
        return {**papers, **steady}

    @property
    def rows(self) -> Mapping[str, cell.Row]:
        return _rows()

    def calls(self, workload: str, rng: random.Random, rate: float, count: int) -> Sequence[TraceCall]:
        name = workload.split("-", 1)[0]
        calls = text2sql_workflows.trace(rng, DATABASES[name], workflows=count, rate=rate, name=name)
        return text2sql_workflows.in_turn(calls, ACTIVE) if rate == SATURATED else calls

    def learned_from(self) -> Sequence[TraceCall]:
        return text2sql_workflows.learned()

    def numbers(self, outcome: cell.Outcome, key: suite.CellKey) -> Report:
        """Latencies of the counted workflows, and the shares of them that end within multiples of their unloaded time."""
        times = slowdown.of_outcome(self.trace(key), outcome, list(pools.pool(key.pool).values()))
        if key.trace.startswith(STEADY):
            times = times[round(WARM_UP * len(times)) :]
        latencies_s = [found.latency_s for found in times]
        shares = {name: fmean(found.slowdown <= most for found in times) for name, most in WITHIN.items()}
        return {
            "deadline_95_s": bench_report.attained_s(latencies_s, 0.95),
            "deadline_99_s": bench_report.attained_s(latencies_s, 0.99),
            "mean_s": fmean(latencies_s),
            **shares,
            "throughput": load_suite.steady_throughput(outcome.finished_s),
            "queued_share": outcome.queued_share,
        }


SUITE = Text2Sql()
