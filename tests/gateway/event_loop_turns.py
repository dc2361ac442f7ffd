"""Counts what happens in each turn of the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tidegate_gateway import loop_steps


class Turns:
    """A turn of the counter may see the end of one turn of the loop and the beginning of the next one."""

    def __init__(self) -> None:
        self._turn = 0
        self.counts: dict[int, int] = {}
        """What `add` counted, by turn."""

    def add(self, count: int = 1) -> None:
        self.counts[self._turn] = self.counts.get(self._turn, 0) + count

    async def run(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def running(turns: Turns) -> AsyncIterator[None]:
    """The turns are counted while the context lasts."""
    task = asyncio.create_task(turns.run())
    try:
        yield
    finally:
        task.cancel()


class CountedSteps(loop_steps.LoopSteps):
    """Counts the steps that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    async def next(self) -> None:
        self.taken += 1
        await super().next()
