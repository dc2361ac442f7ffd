"""A pace for each tenant, so that the work of its requests together takes a bounded part of the event loop."""

import asyncio
import collections
import math

MOST_TENANTS = 10_000
"""Tenants before those that owe nothing are forgotten. Each that owes something has a request that waits,
so connections bound them."""


class TenantPace:
    """Units of work, such as bytes, of which each tenant may spend so many a second."""

    def __init__(self, units_per_s: float, *, burst_s: float = 0.0, tenants: float = math.inf) -> None:
        """A tenant that has spent nothing may spend the units of `burst_s` seconds at once. While more than `tenants`
        tenants wait, all of them together spend as much as so many."""
        self._units_per_s = units_per_s
        self._tenants = tenants
        self._waiting: collections.Counter[str | None] = collections.Counter()
        """The requests of each tenant that wait."""
        self._burst_s = burst_s
        self._paid_at_s: dict[str | None, float] = {}
        """The instant at which all that each tenant has spent is paid."""
        self._most = MOST_TENANTS
        """Tenants before those that owe nothing are forgotten."""

    async def spend(self, tenant: str | None, units: float) -> None:
        """Returns when what was spent before is paid. Those that wait go on in the order of their calls."""
        if units <= 0:
            return
        units *= max(len(self._waiting) / self._tenants, 1.0)
        now = asyncio.get_running_loop().time()
        at_s = max(now, self._paid_at_s.get(tenant, now))
        self._paid_at_s[tenant] = at_s + units / self._units_per_s
        if len(self._paid_at_s) > self._most:
            self._paid_at_s = {name: paid_at_s for name, paid_at_s in self._paid_at_s.items() if paid_at_s > now}
            self._most = max(MOST_TENANTS, 2 * len(self._paid_at_s))
        if at_s > now + self._burst_s:
            self._waiting[tenant] += 1
            try:
                await asyncio.sleep(at_s - now - self._burst_s)
            except asyncio.CancelledError:
                self._paid_at_s[tenant] = self._paid_at_s.get(tenant, now) - units / self._units_per_s
                raise
            finally:
                self._waiting[tenant] -= 1
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
