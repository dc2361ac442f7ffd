"""The text-to-SQL suite: agentic workflows on two pools of unequal engines (HexGen-Text2SQL, section 5).

Every row runs vLLM's scheduler with the same batch limits, KV size and prefix cache; rows differ in the dispatcher's rule
and in the order of waiting. Our setting is one for all cells. Lengths and templates are learned from a trace that no cell
runs. Two loads are the paper's, far above what the pools can sustain; the third is 0.7 of their measured capacity.
"""

import argparse
import concurrent.futures
import logging
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from tidegate_policy.dispatch import routing
from tidegate_sim import cluster, history, pools, report, text2sql
from tidegate_sim.suites import text2sql_tables

NAME = "text2sql"

told = text2sql_tables.told

TRACES: Mapping[str, Sequence[text2sql.Database]] = {
    "financial": (text2sql.FINANCIAL,),
    "formula1": (text2sql.FORMULA1,),
    "both": (text2sql.FINANCIAL, text2sql.FORMULA1),
}
"""The paper's three: one database each, and both."""
SEEDS: Mapping[str, int] = {"financial": 101, "formula1": 102, "both": 103}
"""Fixed before the first run."""
LEARNED_FROM, LEARNED_WORKFLOWS = 7, 200
"""Seed and length of the trace that lengths and templates are learned from."""
POOLS = ("hetero-1", "hetero-2")
RATES = (0.5, 1.0)
BELOW_CAPACITY = 0.7

SCORE = routing.DispatchSettings(rule="score", alpha=0.2, beta=300.0)
"""alpha is among the paper's best (0.1 to 0.4); beta, which it does not publish, was chosen on other seeds."""
DEADLINE_S = 300.0
"""What a workflow is promised, in all rows; the schedulers share it over the stages, the figures do not depend on it."""

PAPERS_ROW, STRONG_ROW = "RR + FCFS", "least requests + FCFS"
HEXGEN, OURS = "score + urgency", "least delay + urgency"
"""The paper's method, and what the product does by default: one setting each for all cells."""


def _setting(rule: str, policy: str) -> cluster.Setting:
    dispatch = SCORE if rule == SCORE.rule else routing.DispatchSettings(rule=rule)
    return cluster.Setting(dispatch=dispatch, policy=policy, deadline_s=DEADLINE_S)


ROWS: Mapping[str, cluster.Setting] = {
    PAPERS_ROW: _setting("round-robin", "fcfs"),
    STRONG_ROW: _setting("least-requests", "fcfs"),
    "power of two + FCFS": _setting("power-of-two", "fcfs"),
    "RR + urgency": _setting("round-robin", "urgency"),
    "score + FCFS": _setting("score", "fcfs"),
    HEXGEN: _setting("score", "urgency"),
    OURS: _setting("least-delay", "urgency"),
}

PAPER = {
    PAPERS_ROW: {"deadline_95": (1.67, 1.41), "deadline_99": (1.60, 1.35), "throughput": (1.75, 1.65)},
    "RR + urgency": {"deadline_95": (1.38, 1.18), "deadline_99": (1.40, 1.24)},
    "score + FCFS": {"deadline_95": (1.50, 1.20), "deadline_99": (1.40, 1.20)},
}
"""By how much the paper's system beats a row, on its cards and traces (sections 5.2, 5.3): (best cell, mean of cells)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much to run."""

    workflows: int = 32
    """In each trace. Fixed, because in an overloaded open-loop run figures grow with it."""
    jobs: int = os.cpu_count() or 1
    """Processes; with 1 everything runs in this one."""
    pools: Sequence[str] = POOLS
    rates: Sequence[float] = RATES
    traces: Sequence[str] = tuple(TRACES)


def options(arguments: argparse.Namespace) -> Options:
    """From the command line; what was not said keeps its default."""
    said = {"workflows": arguments.workflows, "jobs": arguments.jobs}
    return replace(Options(), **{name: value for name, value in said.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trace on one pool under one row."""

    pool: str
    rate: float
    row: str
    trace: str
    workflows: int


def run(asked: Options, tell: Callable[[str], None] = lambda line: None) -> report.Report:
    """Runs the suite and returns its report; `tell` hears of each finished run. Minutes."""
    at_papers_rates = _cells(asked, dict.fromkeys(asked.pools, asked.rates), tell)
    capacity = {pool: _capacity(at_papers_rates, pool) for pool in asked.pools}
    below = _cells(asked, {pool: [round(BELOW_CAPACITY * capacity[pool], 4)] for pool in asked.pools}, tell)
    cells = sorted([*at_papers_rates, *below], key=lambda cell: (cell["pool"], cell["rate"]))
    return {
        "suite": NAME,
        "settings": {
            "workflows": asked.workflows,
            "seeds": {trace: SEEDS[trace] for trace in asked.traces},
            "learned_from": {"seed": LEARNED_FROM, "workflows": LEARNED_WORKFLOWS},
            "rows": {name: asdict(setting) for name, setting in ROWS.items()},
        },
        "real": [
            "vLLM's Scheduler and KV-cache manager",
            "the queue that production loads",
            "the gateway's dispatcher",
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


def simulate(task: Run) -> report.Report:
    """One run, in a worker process: everything follows from the task."""
    logging.disable(logging.WARNING)  # vLLM's advice for real engines
    engines = pools.pool(task.pool)
    every = list(TRACES["both"])
    learned = text2sql.trace(random.Random(LEARNED_FROM), every, workflows=LEARNED_WORKFLOWS, rate=1.0, name="learned")
    calls = text2sql.trace(
        random.Random(SEEDS[task.trace]), TRACES[task.trace], workflows=task.workflows, rate=task.rate, name=task.trace
    )
    known = history.learn(learned, list(engines.values()))
    outcome = cluster.Cluster(engines, ROWS[task.row], known, seed=SEEDS[task.trace]).run(calls)
    return report.numbers(outcome)


def _cells(asked: Options, rates: Mapping[str, Sequence[float]], tell: Callable[[str], None]) -> list[report.Report]:
    tasks = [
        Run(pool=pool, rate=rate, row=row, trace=trace, workflows=asked.workflows)
        for pool in asked.pools
        for rate in rates[pool]
        for row in ROWS
        for trace in asked.traces
    ]
    results: dict[Run, report.Report] = {}
    for task, result in _simulated(tasks, asked.jobs):
        results[task] = result
        tell(f"{len(results)}/{len(tasks)}  {task.pool}  {task.rate:g} q/s  {task.row}  {task.trace}")
    return [
        {
            "pool": pool,
            "rate": rate,
            "rows": {
                row: _row(
                    {
                        task.trace: results[task]
                        for task in tasks
                        if (task.pool, task.rate, task.row) == (pool, rate, row)
                    }
                )
                for row in ROWS
            },
        }
        for pool in asked.pools
        for rate in rates[pool]
    ]


def _simulated(tasks: Sequence[Run], jobs: int) -> Iterator[tuple[Run, report.Report]]:
    """Each run with its numbers, in the order in which they end."""
    if jobs == 1:
        yield from ((task, simulate(task)) for task in tasks)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as workers:
        running = {workers.submit(simulate, task): task for task in tasks}
        for future in concurrent.futures.as_completed(running):
            yield running[future], future.result()


def _row(by_trace: Mapping[str, report.Report]) -> report.Report:
    told = ("deadline_95_s", "deadline_99_s", "mean_s", "throughput", "queued_share")
    runs = list(by_trace.values())
    return {**{key: report.over_traces(runs, key) for key in told}, "traces": dict(by_trace)}


def _capacity(cells: Sequence[report.Report], pool: str) -> float:
    """Workflows a second that the best row completes at the highest load, the ends of the trace included."""
    highest = max((cell for cell in cells if cell["pool"] == pool), key=lambda cell: cell["rate"])
    return max(float(row["throughput"]["mean"]) for row in highest["rows"].values())


def _against(cells: Sequence[report.Report], method: str, row: str) -> report.Report:
    """How many times better a method is than a row: best and mean over the cells and traces at the paper's loads."""
    ratios: dict[str, list[float]] = {"deadline_95": [], "deadline_99": [], "throughput": []}
    for cell in cells:
        if cell["rate"] not in RATES:
            continue
        for trace, better in cell["rows"][method]["traces"].items():
            other = cell["rows"][row]["traces"][trace]
            ratios["deadline_95"].append(other["deadline_95_s"] / better["deadline_95_s"])
            ratios["deadline_99"].append(other["deadline_99_s"] / better["deadline_99_s"])
            ratios["throughput"].append(better["throughput"] / other["throughput"])
    return {key: {"best": max(values), "mean": fmean(values)} for key, values in ratios.items()}
