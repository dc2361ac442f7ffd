"""A few places for each tenant, for work that takes much memory at a time."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator

from tidegate_gateway.openai import error_table
from tidegate_policy.model import DropReason


class Place:
    """One place, which is taken and given back any number of times."""

    def __init__(self, semaphore: asyncio.Semaphore) -> None:
        self._semaphore = semaphore
        self._taken = False

    async def take(self) -> None:
        """Returns when the place is this one's."""
        if not self._taken:
            await self._semaphore.acquire()
            self._taken = True

    def give_back(self) -> None:
        """Nothing happens if it is not taken."""
        if self._taken:
            self._taken = False
            self._semaphore.release()


class TenantPlaces:
    """The places of all tenants."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._of_tenant: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    def of(self, tenant: str) -> Place:
        return Place(self._of_tenant.setdefault(tenant, asyncio.Semaphore(self._each)))

    @contextlib.asynccontextmanager
    async def taken(self, tenant: str, within_s: float, told: str) -> AsyncIterator[None]:
        """One place of the tenant is taken meanwhile. Raises `Shed` with what is told when none is free in time."""
        place = self.of(tenant)
        try:
            async with asyncio.timeout(within_s):
                await place.take()
        except TimeoutError as error:
            raise error_table.Shed(DropReason.SATURATED, retry_after_s=within_s, message=told) from error
        try:
            yield
        finally:
            place.give_back()
