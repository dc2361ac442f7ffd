"""Looks at workflows that are watched. A watch asks the store again and again, so the looks of a tenant are paced, and
watchers of the same workflow share them: however many there are, they delay the tenant's own watches only."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from tidegate_gateway import tenant_pace

T = TypeVar("T")

LOOKS_PER_S, TENANTS = 100.0, 5
"""Looks of one tenant, and of how many tenants all together have the looks. Fifty watches of workflows that do not change
are looked at without a delay."""


class WorkflowLooks(Generic[T]):
    """The looks of one gateway."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, _Look[T]] = {}
        """Looks that have not begun."""
        self._pace = tenant_pace.TenantPace(LOOKS_PER_S, tenants=TENANTS)

    async def look(self, what: Hashable, tenant: str | None, look: Callable[[], Awaitable[T]]) -> T:
        """What `look` finds, or a look at the same thing that begins later than this call. Raises what `look` raises."""
        pending = self._pending.get(what)
        if pending is None:
            task = asyncio.ensure_future(self._in_turn(what, tenant, look))
            task.add_done_callback(_taken)
            pending = self._pending[what] = _Look(task)
        pending.watchers += 1
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.watchers -= 1
            if not pending.watchers:  # nobody wants to know any more, unless the look has ended
                self._begun(what, pending)
                pending.task.cancel()

    async def _in_turn(self, what: Hashable, tenant: str | None, look: Callable[[], Awaitable[T]]) -> T:
        await self._pace.spend(tenant, 1)
        await asyncio.sleep(0)  # further watchers may join
        self._begun(what, self._pending[what])
        return await look()

    def _begun(self, what: Hashable, look: "_Look[T]") -> None:
        """Nobody joins this look any more."""
        if self._pending.get(what) is look:
            del self._pending[what]


class _Look(Generic[T]):
    """A look, and those who wait for it."""

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self.task = task
        self.watchers = 0


def _taken(ended: "asyncio.Future[T]") -> None:
    """Nobody has to take the error of a look; asyncio would log it."""
    if not ended.cancelled():
        ended.exception()
