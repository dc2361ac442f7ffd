"""Reads the few numbers that the gateway needs from vLLM's metrics page, by their newer and older names.

A garbled page or an absurd number gives None for that number. No engine is judged by its metrics alone.
"""

import contextlib
import math
import re
from dataclasses import dataclass

NAMES = {
    "running": (b"vllm:num_requests_running",),
    "waiting": (b"vllm:num_requests_waiting",),
    "generated": (b"vllm:generation_tokens_total", b"vllm:generation_tokens"),
    "looked_up": (b"vllm:prefix_cache_queries_total", b"vllm:prefix_cache_queries"),
    "kv_usage": (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
}
MOST = 1e15
"""Of anything that is counted."""
MOST_BYTES = 1024 * 1024
MOST_SERIES = 1000
"""Places of the page that are looked at for one name. Each engine core behind the port has one line."""
_REST = re.compile(rb"(?:\{[^}\n]*+\})?+[ \t]++(\S{1,64}+)(?!\S)")
"""What follows the name on its line: labels and the number. No part of it is searched twice, whatever is on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An engine's load as it reports it; None = not reported, or not credible."""

    running: int | None = None
    waiting: int | None = None
    generated: int | None = None
    """Tokens since it started."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    uses_prefix_cache: bool | None = None
    """It has looked up a prompt in its prefix cache since it started. vLLM looks up each, unless prefix caching is off."""


def read(page: bytes) -> Load:
    """The load on a metrics page. Several engine cores behind one port add up; their KV usage is the highest."""
    page = page[:MOST_BYTES]
    values = {what: next(filter(None, (_numbers(page, name) for name in names)), []) for what, names in NAMES.items()}
    kv_usage, looked_up = values["kv_usage"], _total(values["looked_up"])
    return Load(
        running=_total(values["running"]),
        waiting=_total(values["waiting"]),
        generated=_total(values["generated"]),
        kv_usage=max(kv_usage) if kv_usage and all(0 <= share <= 1 for share in kv_usage) else None,
        uses_prefix_cache=None if looked_up is None else looked_up > 0,
    )


def _numbers(page: bytes, name: bytes) -> list[float]:
    """The numbers of the lines that begin with a name."""
    found: list[float] = []
    end = 0
    for _ in range(MOST_SERIES):
        at = page.find(name, end)
        if at < 0:
            break
        end = at + len(name)
        line = _REST.match(page, end) if not at or page[at - 1 : at] == b"\n" else None
        if line is not None:
            with contextlib.suppress(ValueError):
                found.append(float(line[1]))
    return found


def _total(counts: list[float]) -> int | None:
    credible = bool(counts) and all(0 <= count < MOST for count in counts)
    return round(math.fsum(counts)) if credible else None
