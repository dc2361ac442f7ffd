"""The named fields in a line of the log: names of tenants and engines cannot forge further fields."""

import re
from collections.abc import Mapping

from tidegate_control import log_lines

_PLAIN = re.compile(r"[A-Za-z0-9._~:@+/-]+")


def named(fields: Mapping[str, str | None]) -> str:
    """Fields as ` name=value`; those without a value are left out, and a value that is no plain word is quoted."""
    return "".join(f" {name}={_word(value)}" for name, value in fields.items() if value)


def _word(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{log_lines.escaped(inner)}"'
