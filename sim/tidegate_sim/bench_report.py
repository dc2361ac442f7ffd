"""Numbers of runs, and how they are told: the same inputs write the same bytes.

A report is plain data (dictionaries, lists, numbers rounded to six digits), so that JSON is its only form. Nothing here
depends on wall time or on the order in which runs happened to end.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate_sim import cell


Report = dict[str, Any]


def attained_s(latencies_s: Sequence[float], share: float) -> float:
    """The shortest deadline that `share` of the workflows meet."""
    ordered = sorted(latencies_s)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def numbers(outcome: "cell.Outcome") -> Report:
    """What is kept of one run."""
    return {
        "deadline_95_s": attained_s(outcome.latencies_s, 0.95),
        "deadline_99_s": attained_s(outcome.latencies_s, 0.99),
        "mean_s": fmean(outcome.latencies_s),
        "p50_s": attained_s(outcome.latencies_s, 0.5),
        "throughput": len(outcome.finished_s) / outcome.finished_s[-1],
        "queued_share": outcome.queued_share,
        "preemptions": outcome.preemptions,
        "steps": outcome.steps,
        "busy_share": dict(outcome.busy_share),
        "calls_on": dict(outcome.calls_on),
    }


def over_traces(runs: Sequence[Report], key: str) -> Report:
    """A number's mean and range over the traces."""
    values = [run[key] for run in runs]
    return {"mean": fmean(values), "low": min(values), "high": max(values)}


def text(report: Report) -> str:
    """The report as JSON, byte for byte the same for the same numbers."""
    return json.dumps(_rounded(report), indent=1, sort_keys=True, allow_nan=False) + "\n"


def write(report: Report, directory: Path) -> Path:
    """Writes `report.json` and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.json"
    path.write_text(text(report))
    return path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is text, the others are numbers."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def padded(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([padded(lines[0]), *map(padded, lines[1:])])


def spread(value: Report, digits: int = 0) -> str:
    """`mean [low, high]`, or the mean and why it has no interval."""
    return _spread(value, lambda number: f"{number:.{digits}f}")


def change(ratio: Report) -> str:
    """By how many percent a ratio with an interval is above 1, as `spread`."""
    return _spread(ratio, lambda number: f"{number - 1:+.1%}")


def share(value: Report) -> str:
    """A share with a sign, in percent, as `spread`."""
    return _spread(value, lambda number: f"{number:+.1%}")


def _spread(value: Report, told: Callable[[float], str]) -> str:
    if value["low"] is None:
        return f"{told(value['mean'])} [{no_interval(value['seeds'])}]"
    return f"{told(value['mean'])} [{told(value['low'])}, {told(value['high'])}]"


def no_interval(seeds: int) -> str:
    return f"no interval: {seeds} seed{'' if seeds == 1 else 's'}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
