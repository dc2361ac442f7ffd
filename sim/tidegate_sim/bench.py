"""`tidegate bench`: a suite, or any trace on any pool, in virtual time.

The table goes to standard output, progress to standard error, and the numbers to `report.json` under `--out`.
"""

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate_policy import policies
from tidegate_policy.dispatch import rules
from tidegate_sim import bench_report, engine_models, policy_option, pools, suites, trace_format

if TYPE_CHECKING:
    from tidegate_sim import suite

TRACE_OPTIONS = ("pool", "dispatch", "learn")
"""The options that only `--trace` takes."""
SUITE_OPTIONS = ("jobs", "workflows", "checked_share", "seeds", "rates", "traces", "parts", "trace_file")
"""The options that only a suite takes."""


class UnknownName(ValueError):
    """A suite has no such trace or part; the message lists those that it has."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if vLLM is missing or the trace cannot be read. Exits with 2 on a usage error."""
    commands = parser()
    options = commands.parse_args(argv)
    for name in TRACE_OPTIONS if options.trace is None else SUITE_OPTIONS:
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            commands.error(f"--{flag} goes with {'--trace' if options.trace is None else 'a suite'}")
    if importlib.util.find_spec("vllm") is None:
        if options.scheduler == "vllm" or options.checked_share:
            sys.stderr.write(
                "tidegate bench: it would run vLLM's scheduler, and vLLM is not installed (`make install` installs it). "
                "The fast model of the scheduler runs without vLLM: leave out --scheduler and --checked-share\n"
            )
            return 1
        if options.trace is None:
            sys.stderr.write(
                "vLLM is not installed (`make install` installs it), so no cell is checked on its scheduler\n"
            )
            options.checked_share = 0.0
    began_s = time.monotonic()

    def tell(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - began_s:4.0f} s] {line}\n")

    try:
        report, table = _run(options, tell)
    except OSError as error:
        sys.stderr.write(f"tidegate bench: cannot use {error.filename or 'a file'}: {error.strerror or error}\n")
        return 1
    except (trace_format.BadTrace, pools.UnknownPool, UnknownName) as error:
        sys.stderr.write(f"tidegate bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    try:
        path = bench_report.write(report, options.out)
    except OSError as error:
        sys.stderr.write(f"tidegate bench: the report cannot be written: {error}\n")
        return 1
    sys.stdout.write(bench_report.text(report) if options.json else f"{table}\n\n{path}\n")
    return 0


def _run(options: argparse.Namespace, tell: "suite.Tell") -> tuple[bench_report.Report, str]:
    """The report and its table."""
    if options.trace is None:
        from tidegate_sim import suite

        chosen = suites.load(options.suite)
        if options.trace_file is not None:
            options.trace_file.stat()  # raises OSError before any work
        names = (*SUITE_OPTIONS, "scheduler", "policy")
        given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        _check(options, chosen)
        report = chosen.run(suite.Options(**given), tell)
        return report, chosen.table(report)
    from tidegate_sim import trace_bench

    named = {"pool": options.pool, "policies": options.policy, "rule": options.dispatch, "learn": options.learn}
    named["scheduler"] = options.scheduler
    given = {name: value for name, value in named.items() if value is not None}
    report = trace_bench.run(trace_bench.TraceOptions(trace=options.trace, **given), tell)
    return report, trace_bench.table(report)


def _check(options: argparse.Namespace, chosen: "suite.Suite") -> None:
    """Raises `UnknownName` for a trace or part that the suite does not have, and for policies in a suite without rows of
    single policies."""
    for name, known in (("traces", chosen.traces), ("parts", chosen.parts)):
        for given in getattr(options, name) or ():
            if given not in known:
                raise UnknownName(f"the suite {chosen.name} has no {given!r} among its {name}: {', '.join(known)}")
    if options.policy and chosen.row_of(options.policy[0]) is None:
        raise UnknownName(f"the suite {chosen.name} takes no --policy; relquery, semantic, augmented and streaming do")


def parser() -> argparse.ArgumentParser:
    """The command line of the benchmarks."""
    made = argparse.ArgumentParser(
        prog="tidegate bench", description="Evaluates policies in virtual time with vLLM's scheduler."
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("suite", nargs="?", choices=suites.NAMES, help="a suite")
    what.add_argument("--trace", type=Path, metavar="FILE", help="any trace (JSON lines)")
    made.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR", help="folder of report.json")
    made.add_argument("--json", action="store_true", help="print the report instead of the table")
    made.add_argument("--jobs", type=_positive, metavar="N", help="with a suite: processes; default: one for each core")
    made.add_argument("--workflows", type=_positive, metavar="N", help="with a suite: workflows in each trace")
    made.add_argument(
        "--scheduler", choices=engine_models.MODELS, help="vLLM's own scheduler, or the fast model of it (default)"
    )
    made.add_argument(
        "--checked-share", type=_share, metavar="X", help="with a suite: cells that run on both schedulers (0.1)"
    )
    made.add_argument(
        "--seeds",
        type=_positive,
        metavar="N",
        help="with a suite: seeds of each cell (10, or 5 in prefix and autoscaling)",
    )
    made.add_argument("--rates", type=_rates, metavar="R,...", help="with a suite: these loads only")
    made.add_argument("--traces", type=_names, metavar="NAMES", help="with a suite: these traces only")
    made.add_argument("--parts", type=_names, metavar="NAMES", help="with a suite that has parts: these parts only")
    made.add_argument(
        "--trace-file",
        type=Path,
        metavar="PATH",
        help="a published data set: Mooncake's (prefix), Azure's (maas, autoscaling), the relational prompts (relquery), "
        "the sessions with tools (augmented)",
    )
    made.add_argument("--pool", metavar="NAME", help="with --trace: a pool, or profiles a,b,... (hetero-1)")
    made.add_argument(
        "--policy",
        metavar="NAMES",
        type=_policies,
        help=f"with --trace: policies (fcfs,{policies.DEFAULT}); with relquery, semantic, augmented or streaming: these "
        "policies beside the baselines of the suite; NAME:PARAMETER=VALUE sets a parameter",
    )
    made.add_argument("--dispatch", choices=sorted(rules.RULES), help="with --trace: a dispatch rule (least-delay)")
    made.add_argument("--learn", type=Path, metavar="FILE", help="with --trace: another trace, to learn lengths from")
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, not {text!r}")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(item) for item in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0.5,1,2") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise argparse.ArgumentTypeError("a rate must be positive")
    return rates


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        try:
            policy_option.parse(name)
        except (policies.UnknownPolicy, policies.BadParameter) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


if __name__ == "__main__":
    raise SystemExit(main())
