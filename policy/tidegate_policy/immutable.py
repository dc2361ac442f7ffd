"""Immutable values that are made for each call: a dataclass that is frozen for type checkers and plain at run time.

The `__init__` of a frozen dataclass sets each field by a call of `object.__setattr__`. For the 28 fields of a `Call` this
takes ten times as long as plain assignments, and several such values are made for each call. mypy rejects an assignment
to a field of a `value`, as to one of any frozen dataclass. Values that are made once, such as settings, stay frozen at run
time too.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, **options: Any) -> Any:
        """`dataclasses.dataclass` with the equality and the hash of a frozen one. `frozen` is for type checkers."""
        return dataclasses.dataclass(unsafe_hash=frozen, **options)
