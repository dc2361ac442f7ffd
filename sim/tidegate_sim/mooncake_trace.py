"""Imports the Mooncake conversation trace (JSON lines, Apache-2.0): single calls with the hashes of their 512-token blocks.

Each line has `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`. A hash id stands for its block and
all blocks before it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tidegate_sim.trace_format import BadTrace, TraceCall, opened

BLOCK_TOKENS = 512


def read(path: Path) -> Sequence[TraceCall]:
    """The calls of the trace in their order. Raises `BadTrace`, `OSError`."""
    calls: list[TraceCall] = []
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                prompt, output = max(int(row["input_length"]), 1), max(int(row["output_length"]), 1)
                whole, rest = divmod(prompt, BLOCK_TOKENS)
                sizes = [BLOCK_TOKENS] * whole + ([rest] if rest else [])
                prefix = tuple(zip(map(int, row["hash_ids"]), sizes, strict=False))
                arrival_s = float(row["timestamp"]) / 1000
            except (ValueError, KeyError, TypeError) as error:
                raise BadTrace(f"{path}:{number}: not a line of the Mooncake trace: {error!r}") from error
            calls.append(
                TraceCall(
                    id=f"mooncake{number}",
                    arrival_s=arrival_s,
                    prompt_tokens=prompt,
                    output_tokens=output,
                    prefix=prefix,
                )
            )
    return calls
