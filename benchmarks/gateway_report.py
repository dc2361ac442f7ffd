"""The numbers of `gateway_cpu`: what each gateway was seen to cost, and the tables made from it."""

import collections
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gateway_load


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A kind of requests."""

    mode: str
    prompt_bytes: int
    connections: int


@dataclass(slots=True)
class _Spent:
    """The sums of one cell in one repeat."""

    requests: int = 0
    blocks: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True)
class _Latencies:
    """The latencies of one kind of requests over all repeats."""

    rates: list[float] = field(default_factory=list)
    taken_s: dict[str, list[float]] = field(default_factory=lambda: {"direct": [], "through": []})


class Costs:
    """What one gateway was seen to cost."""

    def __init__(self) -> None:
        self.memory_mb: list[float] = []
        self.idle: list[float] = []
        self.latencies: dict[tuple[str, int], _Latencies] = {}
        self._spent: dict[Cell, dict[int, _Spent]] = {}

    def add(self, repeat: int, cell: Cell, sent: gateway_load.Sent, cpu_s: float) -> None:
        spent = self._spent.setdefault(cell, collections.defaultdict(_Spent))[repeat]
        spent.requests += sent.requests
        spent.blocks += sent.blocks
        spent.cpu_s += cpu_s

    def add_latencies(self, mode: str, prompt_bytes: int, path: str, rate: float, taken_s: Iterable[float]) -> None:
        known = self.latencies.setdefault((mode, prompt_bytes), _Latencies())
        known.taken_s[path] += taken_s
        if path == "through":
            known.rates.append(rate)

    def cpu_s(self, repeat: int, mode: str, prompt_bytes: int) -> float:
        """CPU seconds of such a request in this repeat, with any number of connections."""
        cells = [
            spent[repeat]
            for cell, spent in self._spent.items()
            if (cell.mode, cell.prompt_bytes) == (mode, prompt_bytes)
        ]
        return sum(spent.cpu_s for spent in cells) / sum(spent.requests for spent in cells)

    def repeats_us(self, cell: Cell) -> list[float]:
        return [spent.cpu_s / spent.requests * 1e6 for spent in self._spent[cell].values()]

    def blocks(self, cell: Cell) -> float:
        spent = self._spent[cell].values()
        return sum(item.blocks for item in spent) / sum(item.requests for item in spent)


def rows(cells: Sequence[Cell], found: dict[str, Costs]) -> list[dict[str, Any]]:
    """The CPU time of each cell and environment."""
    reference = next(iter(found.values()))
    made = []
    for cell in cells:
        for name, costs in found.items():
            spent = costs.repeats_us(cell)
            mean, low, high = gateway_load.interval(spent)
            pairs = zip(spent, reference.repeats_us(cell), strict=True)
            ratio = [math.exp(item) for item in gateway_load.interval([math.log(a / b) for a, b in pairs])]
            made.append(
                {
                    "mode": cell.mode,
                    "prompt_bytes": cell.prompt_bytes,
                    "connections": cell.connections,
                    "environment": name,
                    "cpu_us": mean,
                    "cpu_us_95": [low, high],
                    "ratio": ratio[0],
                    "ratio_95": ratio[1:],
                    "blocks": costs.blocks(cell),
                    "repeats_us": spent,
                }
            )
    return made


def latencies(found: dict[str, Costs]) -> list[dict[str, Any]]:
    """Milliseconds that each gateway adds to the direct path."""
    made = []
    for kind in next(iter(found.values())).latencies:
        for name, costs in found.items():
            known = costs.latencies[kind]
            p50, p99 = ([quantile(known.taken_s[path], q) * 1e3 for path in ("direct", "through")] for q in (0.5, 0.99))
            made.append(
                {
                    "mode": kind[0],
                    "prompt_bytes": kind[1],
                    "environment": name,
                    "rate": statistics.fmean(known.rates),
                    "requests": len(known.taken_s["through"]),
                    "direct_p50_ms": p50[0],
                    "direct_p99_ms": p99[0],
                    "added_p50_ms": p50[1] - p50[0],
                    "added_p99_ms": p99[1] - p99[0],
                }
            )
    return made


def processes(found: dict[str, Costs]) -> list[dict[str, Any]]:
    return [
        {"environment": name, "memory_mb": max(costs.memory_mb), "idle_percent": 100 * statistics.median(costs.idle)}
        for name, costs in found.items()
    ]


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def text(report: dict[str, Any], reference: str) -> str:
    """The report as tables."""
    lines = [
        f"{report['repeats']} repeats; answers of {report['tokens']} tokens; "
        f"{'with' if report['store'] else 'without'} a store; load average {report['load_average']:.1f}; "
        f"decision core: {', '.join(f'{name} {form}' for name, form in report['cores'].items())}",
        "",
        f"{'mode':8}{'prompt':>8}{'conns':>6}  {'environment':14}{'CPU us a request':>24}"
        f"{f'ratio to {reference}':>24}{'blocks':>9}",
    ]
    for item in report["rows"]:
        low, high = item["cpu_us_95"]
        ratio_low, ratio_high = item["ratio_95"]
        cpu = f"{item['cpu_us']:.0f} [{low:.0f}, {high:.0f}]"
        ratio = f"{item['ratio']:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]"
        lines.append(
            f"{item['mode']:8}{item['prompt_bytes']:8}{item['connections']:6}  {item['environment']:14}{cpu:>24}"
            f"{ratio:>24}{item['blocks']:>9.1f}"
        )
    if report["latencies"]:
        columns = "".join(f"{name:>14}" for name in ("rate a second", "requests", "direct p50", "added p50"))
        lines += ["", f"{'mode':8}{'prompt':>8}  {'environment':14}{columns}{'direct p99':>14}{'added p99':>14}  (ms)"]
    for item in report["latencies"]:
        times = "".join(f"{item[f'{part}_{q}_ms']:14.2f}" for q in ("p50", "p99") for part in ("direct", "added"))
        lines.append(
            f"{item['mode']:8}{item['prompt_bytes']:8}  {item['environment']:14}{item['rate']:14.0f}"
            f"{item['requests']:14}{times}"
        )
    lines += ["", f"{'environment':14}{'memory MB':>11}{'idle %':>8}"]
    for item in report["processes"]:
        lines.append(f"{item['environment']:14}{item['memory_mb']:11.0f}{item['idle_percent']:8.2f}")
    return "\n".join(lines) + "\n"
