"""Has a tenant used its tokens for this minute? Books tokens in the store, and settles the difference when a call ends.

Without the store each gateway counts what it serves itself, and tells the store when it is back. A command that the store
does not answer is not repeated, because the store may have carried it out.
"""

import asyncio
import collections
import functools
from collections.abc import Callable

from tidegate_gateway.observe import background_loop
from tidegate_gateway.openai import error_table
from tidegate_gateway.store import store_contract, store_link
from tidegate_policy.admit import entitlements, token_minutes
from tidegate_policy.model import DropReason

LATER_S = 1.0
"""Until what could not be given back is tried again."""


class TenantTokens:
    """The minutes of all tenants that have a limit."""

    def __init__(self, link: store_link.StoreLink, *, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._own = token_minutes.TokenMinutes()
        """What the store has not been told, because it did not answer."""
        self._owed: collections.Counter[entitlements.Tenant] = collections.Counter()
        """Tokens of each tenant's minute that are still to be booked; negative numbers are given back."""
        self._owing = asyncio.Event()

    @property
    def settled(self) -> bool:
        """Whether everything that ended calls used is booked."""
        return not self._owed

    async def book(self, tenant: entitlements.Tenant, tokens: int) -> None:
        """Books tokens before a call. Raises `Shed` when the tenant has used its minute. If the client hangs up meanwhile,
        the booking goes on, because the store may have it already, and is given back."""
        booking = asyncio.ensure_future(self._spend(tenant, tokens, used=False))
        try:
            wait_s = await asyncio.shield(booking)
        except asyncio.CancelledError:
            booking.add_done_callback(functools.partial(self._left, tenant, tokens))
            raise
        if wait_s > 0:
            raise error_table.Shed(DropReason.TENANT_LIMIT, retry_after_s=wait_s)

    def _left(self, tenant: entitlements.Tenant, tokens: int, booking: asyncio.Future[float]) -> None:
        """A booking ended whose call is gone."""
        if not booking.cancelled() and booking.exception() is None and booking.result() <= 0:
            self.settle(tenant, used=0, booked=tokens)

    def settle(self, tenant: entitlements.Tenant, *, used: int, booked: int) -> None:
        """A call ended; the difference is booked soon."""
        if tenant.tokens_per_minute is not None:
            self._owed[tenant] += used - booked
            self._owing.set()

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Books what calls used beyond their bookings, or less, until cancelled."""
        while True:
            await self._owing.wait()
            self._owing.clear()
            await loops.step("tenant-tokens", self.flush)
            if self._owed and not self._link.up:
                await asyncio.sleep(LATER_S)
                self._owing.set()

    async def flush(self) -> None:
        """Books what the store does not know yet. What this does not end, because it is cancelled, is not booked twice."""
        for tenant in [*self._owed]:
            if tokens := self._owed.pop(tenant, 0):
                await self._spend(tenant, tokens, used=True)

    async def _spend(self, tenant: entitlements.Tenant, tokens: int, *, used: bool) -> float:
        store, per_minute = self._link.store, tenant.tokens_per_minute
        if per_minute is None:
            return 0.0
        if store is not None and not self._link.up and tokens < 0 and tenant.name not in self._own:
            self._owed[tenant] += tokens  # the store has the booking
            return 0.0
        if store is None or not self._link.up:
            return self._own.spend(self._clock(), tenant.name, tokens, per_minute, used=used)
        untold = self._own.take(self._clock(), tenant.name, per_minute)
        try:
            if untold:
                await store.spend(tenant.name, untold, per_minute, used=True)
                untold = 0
            return await store.spend(tenant.name, tokens, per_minute, used=used)
        except store_contract.NotSent as error:
            self._link.failed(error)
            self._own.spend(self._clock(), tenant.name, untold, per_minute, used=True)
            return self._own.spend(self._clock(), tenant.name, tokens, per_minute, used=used)
        except store_contract.Unavailable as error:
            self._link.failed(error)
            return 0.0
