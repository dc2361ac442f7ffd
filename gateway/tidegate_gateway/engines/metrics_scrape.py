"""Reads the few numbers that the gateway needs from vLLM's metrics page, by their newer and older names.

A garbled page or an absurd number gives None for that number. No engine is judged by its metrics alone.
"""

import math
import re
from dataclasses import dataclass

NAMES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "generated": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
MOST = 1e15
"""Of anything that is counted."""
MOST_BYTES = 4 * 1024 * 1024
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})?[ \t]+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An engine's load as it reports it; None = not reported, or not credible."""

    running: int | None = None
    waiting: int | None = None
    generated: int | None = None
    """Tokens since it started."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""


def read(page: bytes) -> Load:
    """The load on a metrics page. Several engine cores behind one port add up; their KV usage is the highest."""
    values: dict[str, list[float]] = {}
    for name, number in _LINE.findall(page[:MOST_BYTES].decode("utf-8", "replace")):
        try:
            values.setdefault(name, []).append(float(number))
        except ValueError:
            continue
    kv_usage = _first(values, "kv_usage")
    return Load(
        running=_total(_first(values, "running")),
        waiting=_total(_first(values, "waiting")),
        generated=_total(_first(values, "generated")),
        kv_usage=max(kv_usage) if kv_usage and all(0 <= share <= 1 for share in kv_usage) else None,
    )


def _first(values: dict[str, list[float]], what: str) -> list[float]:
    return next((values[name] for name in NAMES[what] if name in values), [])


def _total(counts: list[float]) -> int | None:
    credible = bool(counts) and all(0 <= count < MOST for count in counts)
    return round(math.fsum(counts)) if credible else None
