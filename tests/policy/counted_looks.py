"""Mappings that count how often all of their items are looked at."""

from typing import Any


class CountedLooks:
    """Stands before a class of mappings among the bases of a class."""

    looks = 0

    def __iter__(self) -> Any:
        type(self).looks += 1
        return super().__iter__()  # type: ignore[misc]

    def items(self) -> Any:
        type(self).looks += 1
        return super().items()  # type: ignore[misc]

    def values(self) -> Any:
        type(self).looks += 1
        return super().values()  # type: ignore[misc]
