"""Any trace on any pool: one row for each order of waiting.

Lengths are predicted by stage from another trace, if one is given; else every answer is expected to have the same length.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_policy.dispatch import routing
from tidegate_sim import cluster, history, pools, report, traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run."""

    trace: Path
    pool: str
    policies: Sequence[str]
    dispatch: str
    learn: Path | None = None


def options(arguments: argparse.Namespace) -> Options:
    """From the command line."""
    return Options(
        trace=arguments.trace,
        pool=arguments.pool,
        policies=arguments.policy,
        dispatch=arguments.dispatch,
        learn=arguments.learn,
    )


def run(asked: Options, tell: Callable[[str], None] = lambda line: None) -> report.Report:
    """Raises `traces.BadTrace`, `pools.UnknownPool`, `OSError`."""
    logging.disable(logging.WARNING)  # vLLM's advice for real engines
    engines = pools.pool(asked.pool)
    calls = traces.read(asked.trace)
    if not calls:
        raise traces.BadTrace(f"{asked.trace} holds no calls")
    learned = history.learn(traces.read(asked.learn) if asked.learn else (), list(engines.values()))
    rows: dict[str, report.Report] = {}
    for policy in asked.policies:
        setting = cluster.Setting(dispatch=routing.DispatchSettings(rule=asked.dispatch), policy=policy)
        rows[policy] = report.numbers(cluster.Cluster(engines, setting, learned, seed=0).run(calls))
        tell(f"{len(rows)}/{len(asked.policies)}  {policy}")
    return {"trace": asked.trace.name, "pool": asked.pool, "dispatch": asked.dispatch, "rows": rows}


def told(result: report.Report) -> str:
    """The report for a terminal."""
    header = (
        f"{result['trace']} on {result['pool']}, {result['dispatch']}",
        "p50, s",
        "95%, s",
        "99%, s",
        "mean, s",
        "a second",
    )
    keys = ("p50_s", "deadline_95_s", "deadline_99_s", "mean_s", "throughput")
    return report.table(header, [(name, *(f"{row[key]:.3g}" for key in keys)) for name, row in result["rows"].items()])
