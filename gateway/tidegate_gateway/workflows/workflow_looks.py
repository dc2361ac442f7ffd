"""Looks at workflows that are watched. A watch asks the store again and again, so the looks of a tenant are paced, and
watchers of the same workflow share them: however many there are, they delay the tenant's own watches only."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

LOOKS_PER_S = 100.0
"""Looks of one tenant. Fifty watches of workflows that do not change are looked at without a delay."""
MOST_TENANTS = 10_000
"""Tenants whose last look is remembered."""


class WorkflowLooks(Generic[T]):
    """The looks of one gateway."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, asyncio.Future[T]] = {}
        """Looks that have not begun."""
        self._next_at_s: dict[str | None, float] = {}
        """The instant of each tenant's next look, at the earliest."""

    async def look(self, what: Hashable, tenant: str | None, look: Callable[[], Awaitable[T]]) -> T:
        """What `look` finds, or a look at the same thing that begins later than this call. Raises what `look` raises."""
        pending = self._pending.get(what)
        if pending is None:
            pending = self._pending[what] = asyncio.ensure_future(self._in_turn(what, tenant, look))
        return await asyncio.shield(pending)

    async def _in_turn(self, what: Hashable, tenant: str | None, look: Callable[[], Awaitable[T]]) -> T:
        try:
            now = asyncio.get_running_loop().time()
            at_s = max(now, self._next_at_s.get(tenant, now))
            self._next_at_s[tenant] = at_s + 1 / LOOKS_PER_S
            if len(self._next_at_s) > MOST_TENANTS:
                self._next_at_s = {name: at for name, at in self._next_at_s.items() if at > now}
            await asyncio.sleep(at_s - now)
        finally:
            del self._pending[what]
        return await look()
