"""`tidegate trace import FORMAT FILE`: makes a trace (docs/traces.md) of a public data set."""

import argparse
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from tidegate_cli.command_errors import Usage
from tidegate_policy import duration
from tidegate_sim import (
    mooncake_trace,
    relational_queries,
    servegen_trace,
    text2sql_workflows,
    tool_sessions,
    trace_format,
)

Reader = Callable[[argparse.Namespace], Sequence[trace_format.TraceCall]]
FORMATS: Mapping[str, tuple[str, Reader]] = {
    "azure": (
        "Azure LLM inference trace 2023: CSV of TIMESTAMP, ContextTokens, GeneratedTokens",
        lambda options: list(trace_format.from_azure(options.file)),
    ),
    "mooncake": (
        "Mooncake: JSON lines of timestamp, input_length, output_length, hash_ids",
        lambda options: mooncake_trace.read(options.file),
    ),
    "servegen": (
        "ServeGen: a folder of chunk-N-trace.csv and chunk-N-dataset.json",
        lambda options: servegen_trace.read(
            options.file,
            random.Random(options.seed),
            start_s=options.start,
            span_s=options.span,
            scale=options.scale,
        ),
    ),
    "augmented": (
        "InferCept's sessions with tools: CSV of request_id, tool, segment and their tokens",
        lambda options: tool_sessions.imported(options.file, random.Random(options.seed), rate=options.rate),
    ),
    "relational": (
        "relational prompts: JSON lines of dataset, template, prompt, prompt_tokens and output_tokens",
        lambda options: relational_queries.imported(
            options.file, random.Random(options.seed), queries=options.queries, rate=options.rate
        ),
    ),
    "text2sql": (
        "HexGen-Flow's workflows: JSON lines of steps with step, input_length, output_length",
        lambda options: text2sql_workflows.imported(options.file, random.Random(options.seed), rate=options.rate),
    ),
}
UNITS = {"augmented": "sessions", "relational": "relQueries", "text2sql": "workflows"}
DRAWN = ("servegen", *UNITS)
"""Formats without instants of arrival; these are drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="import")
    importing = verbs.add_parser("import", help="write the calls of a public data set as a trace")
    formats = importing.add_subparsers(dest="format", required=True, metavar="|".join(FORMATS))
    for name, (summary, _) in FORMATS.items():
        one = formats.add_parser(name, help=summary, description=f"Imports {summary}.")
        kind = "folder" if name == "servegen" else "file; .gz is unpacked"
        one.add_argument("file", type=pathlib.Path, metavar="FILE", help=f"the published {kind}")
        one.add_argument("--out", type=pathlib.Path, metavar="TRACE", help="the trace to write (default: output)")
        one.add_argument("--limit", type=_positive_int, metavar="N", help="only the first N calls")
        if name in DRAWN:
            one.add_argument("--seed", type=int, default=0, help="seed of the drawn values (default: %(default)s)")
        if name == "servegen":
            one.add_argument("--start", type=_time, default=0.0, metavar="TIME", help="such as 9h (default: 0s)")
            one.add_argument("--span", type=_time, default=600.0, metavar="TIME", help="how much of it (default: 10m)")
            one.add_argument("--scale", type=_positive, default=1.0, metavar="X", help="multiply all rates by X")
        elif name in DRAWN:
            rate = f"{UNITS[name]} a second (default: 1)"
            one.add_argument("--rate", type=_positive, default=1.0, metavar="R", help=rate)
        if name == "relational":
            one.add_argument(
                "--queries", type=_positive_int, default=100, metavar="N", help="relQueries (default: 100)"
            )


def run(options: argparse.Namespace) -> int:
    _, read = FORMATS[options.format]
    try:
        calls = read(options)[: options.limit]
    except trace_format.BadTrace as error:
        raise Usage(str(error)) from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise Usage(f"cannot read {options.file}: {getattr(error, 'strerror', None) or error}") from None
    if not calls:
        raise Usage(f"{options.file} holds no calls")
    if options.out is None:
        sys.stdout.writelines(trace_format.lines(calls))
    else:
        try:
            trace_format.write(options.out, calls)
        except OSError as error:
            raise Usage(f"cannot write {options.out}: {error.strerror}") from None
    sys.stderr.write(f"{_summary(calls)}{f' in {options.out}' if options.out else ''}\n")
    return 0


def _summary(calls: Sequence[trace_format.TraceCall]) -> str:
    prompt, output = (
        statistics.fmean(getattr(call, name) for call in calls) for name in ("prompt_tokens", "output_tokens")
    )
    span_s = max(call.arrival_s for call in calls)
    return f"{len(calls):,} calls of {span_s:,.0f} s, mean prompt {prompt:,.0f} and output {output:,.0f} tokens"


def _time(text: str) -> float:
    try:
        return duration.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not greater than zero")
    return number


def _positive_int(text: str) -> int:
    return int(_positive(str(int(text))))
