"""Long pieces of work that share the event loop with all other work."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE = 64
"""Items of a list in one step."""


class LoopSteps:
    """One step of one piece of work runs between two turns of other work, however many pieces there are at a time."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def next(self) -> None:
        """Returns when it is the turn of the caller's next step."""
        async with self._one:
            await asyncio.sleep(0)

    async def convert(self, items: Sequence[S], convert: Callable[[S], T]) -> list[T]:
        """Each item converted, a few in each step."""
        found: list[T] = []
        for first in range(0, len(items), AT_ONCE):
            await self.next()
            found += map(convert, items[first : first + AT_ONCE])
        return found
