"""`tidegate replay`: sends the calls of a trace to a running gateway in real time, open loop, and reports what
clients saw."""

import argparse
import asyncio
import json
import math
import pathlib
import secrets
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tidegate_cli import api_key, base_url, openloop
from tidegate_cli.command_errors import Failed, Usage
from tidegate_policy import duration
from tidegate_sim import time_left, trace_format

FORMATS = ("auto", "tidegate", "azure")
SHOWN_ERRORS = 5
WORKFLOW_DEADLINE_S = 300.0
"""The deadline of a workflow for which the trace has none, as in virtual time. The first call's counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=pathlib.Path, help="JSON lines, or a public data set (--format)")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help=f"the gateway (default: %(default)s); {api_key.NAME} in the environment is its API key",
    )
    parser.add_argument("--model", help="model of the calls (default: the gateway's first model)")
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="auto: .csv and .csv.gz are Azure's, others Tidegate's"
    )
    parser.add_argument("--limit", type=_positive(int), metavar="N", help="replay only the first N calls")
    parser.add_argument(
        "--time-scale", type=_positive(float), default=1.0, metavar="X", help="multiply the times of arrival by X"
    )
    parser.add_argument("--max-prompt", type=_positive(int), metavar="TOKENS", help="longest prompt")
    parser.add_argument("--max-output", type=_positive(int), metavar="TOKENS", help="longest answer")
    parser.add_argument(
        "--timeout",
        type=_time_limit,
        default=600.0,
        metavar="TIME",
        help="time limit of a call, such as 90s (default: 10m)",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 1 when any call failed."""
    calls = _load(options)
    if options.out is not None:
        _check_writable(options.out)
    named = secrets.token_hex(4)
    planned = [_planned(call, options, named) for call in calls]
    result = asyncio.run(_replay(planned, options))
    report = summary(calls, result, settings=_settings(options))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(json.dumps(report, sort_keys=True) + "\n" if options.json else table(report))
    return 1 if report["errors"] else 0


def summary(
    calls: Sequence[trace_format.TraceCall], result: openloop.Result, *, settings: dict[str, Any]
) -> dict[str, Any]:
    """The report, with all times in seconds. A call with targets met its SLO when it met all of them."""
    outcomes = result.calls
    done = [outcome for outcome in outcomes if not outcome.error]
    verdicts = [met for call, outcome in zip(calls, outcomes, strict=True) if (met := _met(call, outcome)) is not None]
    span_s = max((outcome.last_at_s or 0.0 for outcome in done), default=0.0)
    return {
        "settings": settings,
        "calls": len(outcomes),
        "errors": len(outcomes) - len(done),
        "error_sentences": dict(
            Counter(outcome.error for outcome in outcomes if outcome.error).most_common(SHOWN_ERRORS)
        ),
        "span_s": span_s,
        "output_tokens": sum(outcome.tokens for outcome in done),
        "calls_by_engine": dict(sorted(Counter(outcome.engine for outcome in done).items())),
        "ttft_s": distribution(outcome.ttft_s for outcome in done),
        "tpot_s": distribution(outcome.tpot_s for outcome in done),
        "e2e_s": distribution(outcome.e2e_s for outcome in done),
        "with_slo": len(verdicts),
        "slo_attainment": statistics.fmean(verdicts) if verdicts else None,
        "workflows": _workflows(calls, result),
    }


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles (nearest rank); None without values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    ranks = {f"p{q}": known[max(math.ceil(q / 100 * len(known)) - 1, 0)] for q in (50, 90, 95, 99)}
    return {"mean": statistics.fmean(known), **ranks}


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"calls {report['calls']}   errors {report['errors']}   seconds {report['span_s']:.1f}   "
        f"output tokens {report['output_tokens']}   by engine {report['calls_by_engine']}",
        f"{'':8}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}",
    ]
    lines += [
        f"{name:8}" + "".join(f"{value:10.3f}" for value in report[name].values())
        for name in ("ttft_s", "tpot_s", "e2e_s")
        if report[name] is not None
    ]
    if report["slo_attainment"] is not None:
        lines.append(f"SLO met by {report['slo_attainment']:.1%} of the {report['with_slo']} calls with an SLO")
    if report["workflows"] is not None:
        workflows = report["workflows"]
        mean = f"   mean {workflows['latency_s']['mean']:.3f} s" if workflows["latency_s"] else ""
        told = ", ".join(f"{count} {outcome}" for outcome, count in workflows["outcomes"].items())
        told = f"   the gateway says {told}" if told else ""
        lines.append(f"workflows {workflows['count']}   in time {workflows['in_time']}{mean}{told}")
    lines += [f"error x{count}: {sentence}" for sentence, count in report["error_sentences"].items()]
    return "\n".join(lines) + "\n"


def _load(options: argparse.Namespace) -> list[trace_format.TraceCall]:
    chosen = options.format
    if chosen == "auto":
        chosen = "azure" if ".csv" in options.trace.suffixes else "tidegate"
    try:
        calls = list(trace_format.from_azure(options.trace)) if chosen == "azure" else trace_format.read(options.trace)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise Usage(f"cannot read {options.trace}: {getattr(error, 'strerror', None) or error}") from None
    except trace_format.BadTrace as error:
        raise Usage(str(error)) from None
    if not calls:
        raise Usage(f"{options.trace} holds no calls")
    return calls[: options.limit]


def _check_writable(path: pathlib.Path) -> None:
    """Checks before the run, because a report that cannot be written after the run is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise Usage(f"cannot write {path}: {error.strerror}") from None


def _planned(call: trace_format.TraceCall, options: argparse.Namespace, run: str) -> openloop.Planned:
    """`run` distinguishes the workflows of this run from those of other runs."""
    deadline_s = WORKFLOW_DEADLINE_S if call.deadline_s is None and call.workflow else call.deadline_s
    names = {
        "x-tidegate-tenant": call.tenant,
        "x-tidegate-class": call.slo_class,
        "x-tidegate-urgency": call.urgency,
        "x-tidegate-slo-ttft-ms": call.ttft_slo_ms,
        "x-tidegate-slo-tpot-ms": call.tpot_slo_ms,
        "x-tidegate-deadline-ms": None if deadline_s is None else deadline_s * 1000,
        "x-tidegate-workflow": f"{call.workflow}~{run}" if call.workflow else None,
        "x-tidegate-stage": call.stage,
        "x-session-id": call.session,
    }
    return openloop.Planned(
        id=call.id,
        at_s=call.arrival_s * options.time_scale,
        prompt_tokens=min(call.prompt_tokens, options.max_prompt or call.prompt_tokens),
        output_tokens=min(call.output_tokens, options.max_output or call.output_tokens),
        headers={
            name: str(round(value)) if isinstance(value, int | float) else value
            for name, value in names.items()
            if value not in (None, "")
        },
        after=call.after,
        workflow=f"{call.workflow}~{run}" if call.workflow else "",
        seed=call.prefix[0][0] if call.prefix else zlib.crc32(call.id.encode()),
    )


async def _replay(planned: Sequence[openloop.Planned], options: argparse.Namespace) -> openloop.Result:
    url = base_url.of(options.url)
    headers = api_key.headers()
    try:
        model = options.model or await openloop.only_model(url, headers)
    except openloop.Refused as error:
        raise Failed(f"{url} answers {error}; set {api_key.NAME}") from None
    if model is None:
        raise Failed(f"no gateway answers at {url}; start one (tidegate up) or give its address with --url")
    progress: asyncio.Queue[openloop.Outcome] = asyncio.Queue()
    load = asyncio.create_task(
        openloop.run(
            planned,
            url=url,
            model=model,
            timeout_s=options.timeout,
            progress=progress,
            headers=headers,
        )
    )
    shown = asyncio.create_task(_show(progress, len(planned)))
    try:
        result = await load
    finally:
        shown.cancel()
    if all("ClientConnectorError" in outcome.error for outcome in result.calls):
        raise Failed(f"no gateway answers at {options.url}; start one (tidegate up) or give its address with --url")
    return result


async def _show(progress: asyncio.Queue[openloop.Outcome], total: int) -> None:
    done = errors = 0
    began_s = time.monotonic()
    while True:
        outcome = await progress.get()
        done, errors = done + 1, errors + bool(outcome.error)
        if done % max(total // 20, 1) == 0:
            left = time_left.text(done, total, time.monotonic() - began_s)
            sys.stderr.write(f"{done}/{total} calls, {errors} errors{left and ', ' + left}\n")


def _met(call: trace_format.TraceCall, outcome: openloop.Outcome) -> bool | None:
    targets = [
        (call.ttft_slo_ms, outcome.ttft_s),
        (call.tpot_slo_ms, outcome.tpot_s),
        (None if call.deadline_s is None or call.workflow else call.deadline_s * 1000, outcome.e2e_s),
    ]
    if all(target is None for target, _ in targets):
        return None
    return not outcome.error and all(
        seen is None or seen * 1000 <= target for target, seen in targets if target is not None
    )


def _workflows(calls: Sequence[trace_format.TraceCall], result: openloop.Result) -> dict[str, Any] | None:
    """Latency of whole workflows, from the first call sent to the last token. A failed workflow is never in time.
    `outcomes` counts what the gateway says."""
    workflows: dict[str, list[tuple[trace_format.TraceCall, openloop.Outcome]]] = {}
    for call, outcome in zip(calls, result.calls, strict=True):
        if call.workflow:
            workflows.setdefault(call.workflow, []).append((call, outcome))
    if not workflows:
        return None
    latencies: list[float] = []
    in_time = 0
    for members in workflows.values():
        if any(outcome.error for _, outcome in members):
            continue
        first_at_s = min(outcome.sent_at_s for _, outcome in members)
        latencies.append(max(outcome.last_at_s or 0.0 for _, outcome in members) - first_at_s)
        deadline_s = min((call.deadline_s for call, _ in members if call.deadline_s is not None), default=math.inf)
        in_time += latencies[-1] <= deadline_s
    return {
        "count": len(workflows),
        "in_time": in_time,
        "latency_s": distribution(latencies),
        "outcomes": dict(sorted(Counter(result.workflows.values()).items())),
    }


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("limit", "time_scale", "max_prompt", "max_output", "timeout", "model")
    return {"trace": options.trace.name, **{name: getattr(options, name) for name in kept}}


def _time_limit(text: str) -> float:
    try:
        limit_s = duration.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not limit_s > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return limit_s


def _positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> int | float:
        number = kind(text)
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not greater than zero")
        return number

    parse.__name__ = kind.__name__
    return parse
