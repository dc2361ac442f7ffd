"""Runs a harness: `python -m fuzzing NAME --seconds 60` follows the coverage with atheris, `--replay` tries the valid
examples alone, without it, and `--input FILE` tries one input again.

A harness is a module of this package with `SEEDS` (valid inputs), `DICTIONARY`, `try_input` and perhaps `mutated`. Its
property is in its docstring. `try_input` raises when the gateway does what it must never do, so that atheris keeps the
input.
"""

import argparse
import importlib
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

HARNESSES = (
    "http1", "http2", "json_bodies", "grpc_calls", "engine_answers", "engine_reports", "envoy_streams", "row_servers",
    "caller_tokens", "engine_frames",
)  # fmt: skip
MOST_S = 1.0
"""Of CPU time for one input."""
HANG_S = 120
"""After so long an input counts as one that hangs, however busy the machine is."""
MOST_MEGABYTES = 1024
MOST_BYTES = 8192
"""Of an input."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("name", choices=(*HARNESSES, "all"), help="all goes with --replay")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path())
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--input", type=pathlib.Path)
    given = parser.parse_args()
    os.environ["TIDEGATE_INTERPRETED"] = "1"  # atheris sees no branch of the compiled core
    if given.replay or given.input:
        for name in HARNESSES if given.name == "all" else (given.name,):
            harness = importlib.import_module(f"fuzzing.{name}")
            inputs = [given.input.read_bytes()] if given.input else harness.SEEDS
            for data in inputs:
                _timed(harness.try_input, data)
            print(f"{name}: {len(inputs)} inputs")
    else:
        _fuzz(given)


def _fuzz(given: argparse.Namespace) -> None:
    import atheris

    name = given.name
    with atheris.instrument_imports(include=["tidegate_gateway", "tidegate_policy", "tidegate_control", "hpack", "h2"]):
        harness: Any = importlib.import_module(f"fuzzing.{name}")
    corpus = given.folder / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(harness.SEEDS):
        (corpus / f"seed-{number}").write_bytes(data)
    words = given.folder / f"dictionary-{name}"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in harness.DICTIONARY))
    options = {
        "max_total_time": given.seconds,
        "seed": given.seed,
        "max_len": MOST_BYTES,
        "timeout": HANG_S,
        "rss_limit_mb": MOST_MEGABYTES,
        "dict": words,
        "artifact_prefix": f"{given.folder}/finding-{name}-",
        "print_final_stats": 1,
    }
    mutated = {"custom_mutator": harness.mutated} if hasattr(harness, "mutated") else {}
    arguments = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)]
    atheris.Setup(arguments, lambda data: _timed(harness.try_input, data), **mutated)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return word.replace('"', '\\"')


def _timed(try_input: Callable[[bytes], None], data: bytes) -> None:
    began_s = time.process_time()
    try_input(data)
    taken_s = time.process_time() - began_s
    if taken_s > MOST_S:
        raise TimeoutError(f"an input took {taken_s:.2f} s of CPU time")


if __name__ == "__main__":
    main()
