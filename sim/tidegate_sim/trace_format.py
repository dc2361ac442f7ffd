"""A trace: one call a line of JSON, in arrival order; what `bench` and `replay` run.

`arrival_s` is the instant of arrival; for a call with `after` it is the delay after the last of those has finished.
Importers turn public data sets into traces; `text2sql` makes its own.
"""

import csv
import datetime
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

from tidegate_policy.model import LEAST_URGENT, MOST_URGENT


class BadTrace(ValueError):
    """A line that is not a call; the message names the file, the line and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What follows a call before its session comes back."""

    name: str
    duration_s: float
    return_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """One line."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    """True length. Only the engine may know it, and only by ending there."""
    tenant: str = ""
    task_type: str = ""
    slo_class: str = ""
    """Key `class` in the file."""
    urgency: int | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    deadline_s: float | None = None
    """From the workflow's arrival (the call's own, if it has no workflow)."""
    workflow: str | None = None
    stage: str | None = None
    after: tuple[str, ...] = ()
    relquery: str | None = None
    session: str | None = None
    prefix: tuple[tuple[int, int], ...] = ()
    """(hash id, tokens) of the prompt's shared parts, in order."""
    output_prefix: int | None = None
    """The hash id by which the prefixes of later calls name this call's output."""
    tool: Tool | None = None
    text: str | None = None


_KEYS = {("class" if item.name == "slo_class" else item.name): item.name for item in fields(TraceCall)}
_REQUIRED = ("id", "arrival_s", "prompt_tokens", "output_tokens")
_TEXTS = ("id", "tenant", "slo_class", "workflow", "stage", "relquery", "session", "task_type", "text")
_WHOLE = ("prompt_tokens", "output_tokens", "urgency", "output_prefix")
_NUMBERS = ("arrival_s", "ttft_slo_ms", "tpot_slo_ms", "deadline_s")
_MOST = 1e9


def read(path: Path) -> list[TraceCall]:
    """The calls of a trace file (`.gz` is unpacked). Raises `BadTrace`, `OSError`."""
    calls: list[TraceCall] = []
    known: set[str] = set()
    with opened(path) as given:
        for number, line in enumerate(given, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            call = _parsed(line, where)
            if call.id in known:
                raise BadTrace(f"{where}: id {call.id!r} appears twice")
            if unknown := [name for name in call.after if name not in known]:
                raise BadTrace(f"{where}: after names {unknown[0]!r}, which no line before has")
            known.add(call.id)
            calls.append(call)
    return calls


def write(path: Path, calls: Iterable[TraceCall]) -> None:
    """Writes a trace file; one whose name ends in `.gz` is packed."""
    with opened(path, "wt") as written:
        written.writelines(lines(calls))


def lines(calls: Iterable[TraceCall]) -> Iterator[str]:
    """The lines of a trace file."""
    return (f"{json.dumps(_written(call))}\n" for call in calls)


def from_azure(path: Path) -> Iterator[TraceCall]:
    """Azure LLM inference trace 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; CC-BY 4.0): single calls.

    Instants are relative to the first call's. Raises `BadTrace`, `OSError`.
    """
    start: datetime.datetime | None = None
    with opened(path) as given:
        for number, row in enumerate(csv.DictReader(given), 1):
            try:
                at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC)
                sizes = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise BadTrace(f"{path}:{number + 1}: not a line of the Azure trace: {error}") from error
            start = start or at
            arrival_s = (at - start).total_seconds()
            yield TraceCall(
                id=f"azure{number}", arrival_s=arrival_s, prompt_tokens=max(sizes[0], 1), output_tokens=max(sizes[1], 1)
            )


def opened(path: Path, mode: Literal["rt", "wt"] = "rt") -> IO[str]:
    """A file of text; `.gz` is unpacked and packed."""
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)


def _parsed(line: str, where: str) -> TraceCall:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadTrace(f"{where}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BadTrace(f"{where}: a call is an object, not {type(raw).__name__}")
    for name in _REQUIRED:
        if raw.get(name) is None:
            raise BadTrace(f"{where}: {name} is required")
    if unknown := sorted(raw.keys() - _KEYS.keys()):
        raise BadTrace(f"{where}: unknown field {unknown[0]!r}")
    values = {_KEYS[key]: value for key, value in raw.items() if value is not None}
    _check(values, where)
    values["after"] = tuple(values.get("after", ()))
    values["prefix"] = tuple((hash_id, tokens) for hash_id, tokens in values.get("prefix", ()))
    try:
        if "tool" in values:
            values["tool"] = Tool(**values["tool"])
    except TypeError as error:
        raise BadTrace(f"{where}: tool has name, duration_s and return_tokens: {error}") from error
    return TraceCall(**values)


def _check(values: Mapping[str, Any], where: str) -> None:
    for name in _TEXTS:
        if not isinstance(values.get(name, ""), str):
            raise BadTrace(f"{where}: {name} must be a text, not {values[name]!r}")
    for name in _WHOLE:
        if name in values and (isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < 0):
            raise BadTrace(f"{where}: {name} must be a whole number, not {values[name]!r}")
    for name in _NUMBERS:
        if name in values and not _is_number(values[name]):
            raise BadTrace(f"{where}: {name} must be a number from 0 to {_MOST:.0e}, not {values[name]!r}")
    if not _is_list(values.get("after", []), str):
        raise BadTrace(f"{where}: after must be a list of ids, not {values['after']!r}")
    prefix = values.get("prefix", [])
    if not _is_list(prefix, list) or not all(len(part) == 2 and _is_list(part, int) for part in prefix):
        raise BadTrace(f"{where}: prefix must be a list of [hash id, tokens], whole numbers, not {prefix!r}")
    if not MOST_URGENT <= values.get("urgency", LEAST_URGENT) <= LEAST_URGENT:
        raise BadTrace(f"{where}: urgency must be from {MOST_URGENT} to {LEAST_URGENT}, not {values['urgency']}")
    if values.get("stage") and not values.get("workflow"):
        raise BadTrace(f"{where}: stage needs workflow beside it")
    if values["prompt_tokens"] < 1 or values["output_tokens"] < 1:
        raise BadTrace(f"{where}: token counts must be positive")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


def _is_list(value: object, item: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, item) for each in value)


def _written(call: TraceCall) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for key, name in _KEYS.items():
        value = getattr(call, name)
        if isinstance(value, Tool):
            value = {"name": value.name, "duration_s": value.duration_s, "return_tokens": value.return_tokens}
        if value not in (None, "", ()):
            line[key] = value
    return line
