"""Turns a YAML or JSON document into the dataclasses of `gateway_settings`, and names the path of a wrong value.

A key is its field's name in camelCase. A field whose name ends in `_s` holds seconds: its key drops the ending, and its
value is a duration with its unit, such as `60ms`, `1m30s` or `10m`. Unknown keys are errors. The decoder
knows types and not meanings; those belong to `gateway_settings` (docs/decisions/0012).
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tidegate_policy import duration

T = TypeVar("T")


class BadSettings(ValueError):
    """A setting that cannot be used; the message starts with its path."""


def decode(kind: Callable[..., T], value: object, path: str) -> T:
    """`value` as the dataclass `kind`. Raises `BadSettings`."""
    if not isinstance(value, Mapping):
        raise BadSettings(f"{path or 'the settings'} must be a mapping, not {_shown(value)}")
    fields = _fields(kind)
    values: dict[str, Any] = {}
    for key, item in value.items():
        if key not in fields:
            raise BadSettings(f"{_join(path, key)} is not a setting; known here are {', '.join(sorted(fields))}")
        name, hint = fields[key]
        values[name] = _value(hint, item, _join(path, key), in_seconds=name.endswith("_s"))
    try:
        return kind(**values)
    except TypeError as error:
        missing = [key for key, (name, _) in fields.items() if name not in values and _required(kind, name)]
        raise BadSettings(f"{_join(path, missing[0]) if missing else path} is required") from error


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
def _fields(kind: Any) -> dict[str, tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return {_key(field.name): (field.name, hints[field.name]) for field in dataclasses.fields(kind)}


def _key(name: str) -> str:
    head, *tail = name.removesuffix("_s").split("_")
    return head + "".join(word.capitalize() for word in tail)


def _required(kind: Any, name: str) -> bool:
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


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
        return tuple(_value(item_hint, item, f"{path}[{i}]", in_seconds=False) for i, item in enumerate(value))
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise BadSettings(
                f"{path} must be one of {', '.join(map(str, typing.get_args(hint)))}, not {_shown(value)}"
            )
        return value
    if hint is float and in_seconds:
        return seconds(value, path)
    return _scalar(hint, value, path)


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
