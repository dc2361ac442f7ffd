"""`tidegate bench`: a suite, or any trace on any pool, in virtual time.

The table goes to standard output, progress to standard error, and the numbers to `report.json` under `--out`.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tidegate_policy import policies
from tidegate_policy.dispatch import rules
from tidegate_sim import pools, traces

SUITES = ("text2sql",)
"""Known without importing them: that takes vLLM, and seconds."""
DEFAULTS = {"pool": "hetero-1", "policy": ("fcfs", "urgency"), "dispatch": "score", "learn": None}
"""Of the options that only a trace takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if vLLM is missing or the trace cannot be read; exits with 2 on a usage error."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name, default in DEFAULTS.items():
        if options.trace is None and getattr(options, name) is not None:
            parser.error(f"--{name} goes with --trace")
        setattr(options, name, getattr(options, name) or default)
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write(
            "tidegate bench: it runs vLLM's scheduler, and vLLM is not installed (`make bench` installs it)\n"
        )
        return 1
    from tidegate_sim import report
    from tidegate_sim.suites import any_trace, text2sql

    suite = any_trace if options.trace else {text2sql.NAME: text2sql}[options.suite]
    began_s = time.monotonic()

    def tell(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - began_s:4.0f} s] {line}\n")

    try:
        result = suite.run(suite.options(options), tell)
    except (traces.BadTrace, pools.UnknownPool, OSError) as error:
        sys.stderr.write(f"tidegate bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    path = report.write(result, options.out)
    sys.stdout.write(report.text(result) if options.json else f"{suite.told(result)}\n\n{path}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate bench", description="Policies in virtual time, with vLLM's own scheduler."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("suite", nargs="?", choices=SUITES, help="a suite")
    what.add_argument("--trace", type=Path, metavar="FILE", help="any trace (JSON lines)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR", help="where report.json goes")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes; default: one for each core")
    parser.add_argument("--workflows", type=_positive, metavar="N", help="workflows in each of a suite's traces")
    parser.add_argument("--pool", metavar="NAME", help="with --trace: a pool, or profiles a,b,... (hetero-1)")
    parser.add_argument("--policy", metavar="NAMES", type=_policies, help="with --trace: orders (fcfs,urgency)")
    parser.add_argument("--dispatch", choices=sorted(rules.RULES), help="with --trace: a rule (score)")
    parser.add_argument(
        "--learn", type=Path, metavar="FILE", help="with --trace: another trace, to predict lengths from"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in policies.POLICIES:
            raise argparse.ArgumentTypeError(
                f"unknown policy {name!r}; known are {', '.join(sorted(policies.POLICIES))}"
            )
    return names


if __name__ == "__main__":
    raise SystemExit(main())
