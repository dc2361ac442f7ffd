"""Turns at the store's connections, so that many commands of one tenant do not take all connections from the others.

At most `limit` commands run at once. Further commands wait: the tenants take turns, and the commands of one tenant keep
their order. When the store fails, all that wait fail at once instead of one after the other.
"""

import asyncio
import collections
from types import TracebackType

from tidegate_gateway.store import store_contract


class Turns:
    """The turns of one store."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}
        """By tenant; the first tenant has the next turn. No queue is empty."""

    def __len__(self) -> int:
        """The commands that wait."""
        return sum(map(len, self._waiting.values()))

    def of(self, tenant: str) -> "Turn":
        """A turn of the tenant, as an asynchronous context. Raises `store_contract.Unavailable`."""
        return Turn(self, tenant)

    async def take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1  # nothing waits while a connection is free
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, collections.deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back()  # the turn came at the same time
            raise

    def give_back(self) -> None:
        """The turn goes to the first command of the next tenant."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            future = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # at the end of the round
            if not future.done():
                future.set_result(None)
                return
        self._free += 1

    def fail(self, reason: str) -> None:
        """All commands that wait raise `store_contract.Unavailable`."""
        waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for future in queue:
                if not future.done():
                    future.set_exception(store_contract.Unavailable(reason))


class Turn:
    """One turn."""

    __slots__ = ("_tenant", "_turns")

    def __init__(self, turns: Turns, tenant: str) -> None:
        self._turns = turns
        self._tenant = tenant

    async def __aenter__(self) -> None:
        await self._turns.take(self._tenant)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.give_back()
