"""`tidegate bench --trace FILE`: any trace on any pool, with one row for each scheduling policy.

Lengths are learned from another trace if one is given, and from the calls that end during the run, as in a gateway.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tidegate_policy import gateway_core, policies
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.routing import DispatchSettings
from tidegate_sim import (
    bench_report,
    cell,
    engine_limits,
    engine_models,
    policy_option,
    pools,
    suite,
    time_left,
    trace_format,
)
from tidegate_sim.bench_report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What to run. The defaults are the product's."""

    trace: Path
    pool: str = "hetero-1"
    policies: Sequence[str] = ("fcfs", policies.DEFAULT)
    rule: str = DispatchSettings().rule
    learn: Path | None = None
    scheduler: engine_models.Model = "fast"


def run(options: TraceOptions, tell: suite.Tell = lambda line: None) -> Report:
    """Runs every row. Raises `trace_format.BadTrace`, `pools.UnknownPool`, `OSError`."""
    engines = pools.pool(options.pool)
    calls = trace_format.read(options.trace)
    if not calls:
        raise trace_format.BadTrace(f"{options.trace} holds no calls")
    _check_sizes(options, calls, engines.values())
    learned = trace_format.read(options.learn) if options.learn else ()
    rows: dict[str, Report] = {}
    began_s = time.monotonic()
    for policy in options.policies:
        chosen = policy_option.parse(policy)
        settings = gateway_core.CoreSettings(policy=chosen.name, dispatch=DispatchSettings(rule=options.rule))
        row = cell.Row(gateway=settings, model=options.scheduler, engine_parameters=chosen.parameters)
        with suite.without_warnings():
            outcome = cell.Cell(engines, row, learned, seed=0).run(calls)
        rows[policy] = {**_latencies(outcome), **_targets(calls, outcome)}
        left = time_left.text(len(rows), len(options.policies), time.monotonic() - began_s)
        tell(f"{len(rows)}/{len(options.policies)}  {policy}  {left}".rstrip())
    return {
        "trace": options.trace.name,
        "pool": options.pool,
        "dispatch": options.rule,
        "scheduler": options.scheduler,
        "rows": rows,
    }


def _check_sizes(options: TraceOptions, calls: Sequence[trace_format.TraceCall], engines: Iterable[CostModel]) -> None:
    """Raises `trace_format.BadTrace` for a call that some engine of the pool could never serve."""
    context = engine_limits.MAX_MODEL_LEN
    memory = min(engine.kv_tokens for engine in engines)
    for call in calls:
        output = min(call.output_tokens, engine_limits.MAX_OUTPUT_TOKENS, context - call.prompt_tokens)
        if call.prompt_tokens >= context:
            most = f"the context of {context} tokens"
        elif call.prompt_tokens + output > memory:
            most = f"the KV memory of an engine of {options.pool}, which holds {memory} tokens"
        else:
            continue
        raise trace_format.BadTrace(
            f"{options.trace}: the call {call.id} with a prompt of {call.prompt_tokens} tokens does not fit into {most}"
        )


def table(report: Report) -> str:
    """The report for a terminal."""
    header = (
        f"{report['trace']} on {report['pool']}, {report['dispatch']}",
        "p50, s",
        "95%, s",
        "99%, s",
        "mean, s",
        "a second",
        "shed",
        "targets met",
    )
    keys = ("p50_s", "deadline_95_s", "deadline_99_s", "mean_s", "throughput")
    rows = [
        (
            name,
            *("-" if row[key] is None else f"{row[key]:.3g}" for key in keys),
            str(row["shed"]),
            "-" if row["attainment"] is None else f"{row['attainment']:.1%}",
        )
        for name, row in report["rows"].items()
    ]
    return bench_report.table(header, rows)


def _latencies(outcome: cell.Outcome) -> Report:
    if outcome.latencies_s:
        return bench_report.numbers(outcome)
    return dict.fromkeys(("p50_s", "deadline_95_s", "deadline_99_s", "mean_s", "throughput"))


def _targets(calls: Sequence[trace_format.TraceCall], outcome: cell.Outcome) -> Report:
    """How many calls were shed, which share of the calls with targets met all of them, and the mean TTFT by urgency."""
    ended = {item.id: item for item in outcome.calls}
    verdicts = [met for call in calls if (met := _met(call, ended.get(call.id))) is not None]
    levels = sorted({call.urgency for call in calls if call.urgency is not None})
    ttfts = {level: [item.ttft_s for item in outcome.calls if item.urgency == level] for level in levels}
    return {
        "shed": sum(item.shed is not None for item in outcome.calls),
        "with_targets": len(verdicts),
        "attainment": sum(verdicts) / len(verdicts) if verdicts else None,
        "mean_ttft_s_by_urgency": {
            str(level): fmean(known)
            for level, values in ttfts.items()
            if (known := [v for v in values if v is not None])
        },
    }


def _met(call: trace_format.TraceCall, outcome: cell.CallOutcome | None) -> bool | None:
    """Whether the call met its own targets; None for a call without targets. A workflow's deadline is not the call's
    own."""
    deadline_s = None if call.workflow else call.deadline_s
    if call.ttft_slo_ms is None and call.tpot_slo_ms is None and deadline_s is None:
        return None
    if outcome is None or outcome.e2e_s is None or outcome.ttft_s is None:
        return False
    tpot_s = (outcome.e2e_s - outcome.ttft_s) / max(outcome.output_tokens - 1, 1)
    return (
        (call.ttft_slo_ms is None or outcome.ttft_s * 1000 <= call.ttft_slo_ms)
        and (call.tpot_slo_ms is None or tpot_s * 1000 <= call.tpot_slo_ms)
        and (deadline_s is None or outcome.e2e_s <= deadline_s)
    )
