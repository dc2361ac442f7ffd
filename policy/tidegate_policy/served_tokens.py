"""What was each tenant served? The gateway core counts it, and the admin port and the page show it. It decides nothing.

The counters decay by half each `HALF_LIFE_S`, so a tenant that was quiet is not repaid for ever.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

HALF_LIFE_S = 300.0
MAX_TENANTS = 1000
"""Tenants counted by name; the tenant that was served least recently is forgotten first."""


class TenantService:
    """Weighted tokens of service by tenant: tokens divided by the tenant's weight. An answer costs the same, however many
    tenants there are."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tenant -> (weighted tokens, instant of the last update), the one first that was served least recently."""

    def observe(self, now: float, tenant: str, tokens: int, weight: float) -> None:
        """`tokens` tokens were computed for the tenant, whose fair share is `weight`."""
        self._served[tenant] = (self.served(now, tenant) + tokens / max(weight, 1e-3), now)
        self._served.move_to_end(tenant)
        if len(self._served) > MAX_TENANTS:
            self._served.popitem(last=False)

    def served(self, now: float, tenant: str) -> float:
        """Weighted tokens that the tenant was served, decayed to `now`."""
        tokens, at_s = self._served.get(tenant, (0.0, now))
        return tokens * math.exp2((at_s - now) / HALF_LIFE_S)

    def shares(self, now: float) -> Mapping[str, float]:
        """Each tenant's share of the service, weighted; the shares add up to 1."""
        served = {tenant: self.served(now, tenant) for tenant in self._served}
        total = sum(served.values())
        return {tenant: tokens / total for tenant, tokens in served.items()} if total else {}
