"""Turns a YAML or JSON document into the dataclasses of `gateway_settings`, and names the path of a wrong value.

A key is its field's name in camelCase. A field whose name ends in `_s` holds seconds: its key drops the ending, and its
value is a duration with its unit, such as `60ms`, `1m30s` or `10m`. Unknown keys are errors, unless the document says
`skipUnknown: true`. The decoder knows types and not meanings; those belong to `gateway_settings` (docs/decisions/0012).
"""

import dataclasses
import difflib
import functools
import logging
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tidegate_policy import duration

T = TypeVar("T")

logger = logging.getLogger("tidegate.gateway")


class BadSettings(ValueError):
    """Settings that cannot be used. Each problem is one sentence that starts with the path of its setting."""

    def __init__(self, *problems: str, unknown: Iterable[str] = ()) -> None:
        """`unknown`: the paths of the keys that are no settings."""
        super().__init__("; ".join(problems))
        self.problems = problems
        self.unknown = tuple(unknown)


def decode_document(kind: Callable[..., T], document: object) -> T:
    """A whole document as the dataclass `kind`. With `skipUnknown: true`, keys that are no settings are skipped with a
    warning: an older gateway takes the settings that a newer operator writes. Raises `BadSettings` with all problems."""
    try:
        return decode(kind, document, "")
    except BadSettings as error:
        if not (error.unknown and isinstance(document, Mapping) and document.get("skipUnknown") is True):
            raise
        logger.warning("this version does not know these settings, and skips them: %s", ", ".join(error.unknown))
        for path in error.unknown:
            document = _without(document, [int(step) if step.isdigit() else step for step in _STEPS.findall(path)])
        return decode(kind, document, "")


_STEPS = re.compile(r"[^.\[\]]+")


def _without(value: Any, path: list[str | int]) -> Any:
    """A copy of the value without the key at the end of the path."""
    step, *further = path
    if isinstance(step, int):
        return [_without(item, further) if i == step else item for i, item in enumerate(value)]
    inner = {step: _without(value[step], further)} if further else {}
    return {**{key: item for key, item in value.items() if key != step}, **inner}


def decode(kind: Callable[..., T], value: object, path: str) -> T:
    """`value` as the dataclass `kind`. Raises `BadSettings` with all problems."""
    if not isinstance(value, Mapping):
        raise BadSettings(f"{path or 'the settings'} must be a mapping, not {_shown(value)}")
    known = fields(kind)
    values: dict[str, Any] = {}
    problems: list[str] = []
    unknown: list[str] = []
    for key, item in value.items():
        if key not in known:
            problems.append(f"{_join(path, key)} is not a setting; {suggestion(key, known)}")
            if isinstance(key, str) and key.isidentifier():  # else it is no setting of any version
                unknown.append(_join(path, key))
            continue
        name, hint = known[key]
        try:
            values[name] = _value(hint, item, _join(path, key), in_seconds=name.endswith("_s"))
        except BadSettings as error:
            problems += error.problems
            unknown += error.unknown
    problems += [
        f"{_join(path, key)} is required"
        for key, (name, _) in known.items()
        if key not in value and required(kind, name)
    ]
    if problems:
        raise BadSettings(*problems, unknown=unknown)
    return kind(**values)


def suggestion(name: object, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known name, and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.7)
    return f"{f'did you mean {near[0]}? ' if near else ''}known are {', '.join(names) or 'none'}"


def seconds(value: object, path: str) -> float:
    """A duration with its unit, as seconds. Raises `BadSettings`, also for a number without a unit."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        raise BadSettings(f"{path} must be a duration: {value:g} has no unit; write {value:g}ms or {value:g}s")
    if isinstance(value, str):
        try:
            return duration.seconds(value)
        except ValueError as error:
            raise BadSettings(f"{path} must be a duration: {error}") from None
    raise BadSettings(f"{path} must be a duration such as 60ms, 1.5s or 10m, not {_shown(value)}")


@functools.cache
def fields(kind: Any) -> dict[str, tuple[str, Any]]:
    """The settings of the dataclass `kind`: key in the file -> name and type of the field."""
    hints = typing.get_type_hints(kind)
    return {key(field.name): (field.name, hints[field.name]) for field in dataclasses.fields(kind)}


def key(name: str) -> str:
    """The key of a field in the file."""
    head, *tail = name.removesuffix("_s").split("_")
    return head + "".join(word.capitalize() for word in tail)


def required(kind: Any, name: str) -> bool:
    """Whether the field `name` of the dataclass `kind` has no default."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default(kind: Any, name: str) -> Any:
    """The default of the field `name`, which is not required."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _value(hint: Any, value: object, path: str, *, in_seconds: bool) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        errors = []
        for option in options:
            if option is not type(None):
                try:
                    return _value(option, value, path, in_seconds=in_seconds)
                except BadSettings as error:
                    errors.append(error)
        raise errors[0]
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type", hint), value, path)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise BadSettings(f"{path} must be a list, not {_shown(value)}")
        (item_hint, _) = typing.get_args(hint)
        return _items(item_hint, value, path)
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise BadSettings(
                f"{path} must be one of {', '.join(map(str, typing.get_args(hint)))}, not {_shown(value)}"
            )
        return value
    if hint is float and in_seconds:
        return seconds(value, path)
    return _scalar(hint, value, path)


def _items(hint: Any, value: Iterable[object], path: str) -> tuple[Any, ...]:
    items: list[Any] = []
    problems: list[str] = []
    unknown: list[str] = []
    for i, item in enumerate(value):
        try:
            items.append(_value(hint, item, f"{path}[{i}]", in_seconds=False))
        except BadSettings as error:
            problems += error.problems
            unknown += error.unknown
    if problems:
        raise BadSettings(*problems, unknown=unknown)
    return tuple(items)


def _scalar(hint: Any, value: object, path: str) -> Any:
    if typing.get_origin(hint) is not None:  # Mapping[...], taken as it is
        if not isinstance(value, Mapping):
            raise BadSettings(f"{path} must be a mapping, not {_shown(value)}")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise BadSettings(f"{path} must be {_WORDS[hint]}, not {_shown(value)}")
    if hint is float and not math.isfinite(value):
        raise BadSettings(f"{path} must be a finite number, not {_shown(value)}")
    return value


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _shown(value: object) -> str:
    return repr(value)[:80]
