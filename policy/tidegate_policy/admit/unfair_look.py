"""Which tenants had more than they may have at the last look? A look at all tenants for each call would take too long."""

import math
from collections.abc import Callable, Mapping

from tidegate_policy.admit.tenant_record import TenantRecord

LOOK_S = 0.05
"""How long a look counts."""
HOLD_AGAIN_S = 0.1
"""Until further calls are held again."""


class UnfairLook:
    """The last look at the places of all tenants."""

    def __init__(self, tenants: Mapping[str, TenantRecord], find: Callable[[float], Mapping[str, float]]) -> None:
        """`find` gives the bounds of the tenants that compete at an instant."""
        self._tenants, self._find = tenants, find
        self._next_at_s = -math.inf
        self._held_again_at_s = -math.inf
        """The earliest instant at which calls may be held again."""
        self._bounds: Mapping[str, float] = {}
        """Those at the last look, if some tenant had more than its bound."""

    def is_over(self, now: float) -> None:
        """Something has happened that changes what the look showed."""
        self._next_at_s = now

    def bounds(self, now: float) -> Mapping[str, float]:
        """The bounds of all tenants if some tenant has more than its bound, as far as the last look showed; else empty."""
        tenants = self._tenants
        if len(tenants) < 2:
            return {}
        if now >= self._next_at_s:
            self._next_at_s = now + LOOK_S
            found = self._find(now)  # a tenant of it may be forgotten
            unfair = [name for name, bound in found.items() if name in tenants and tenants[name].has > bound]
            self._bounds = found if unfair else {}
        return self._bounds

    def surplus(self, now: float) -> dict[str, int]:
        """Sequences that tenants have beyond their bounds. Empty for a while after it was not: the caller holds calls."""
        found: dict[str, int] = {}
        if now < self._held_again_at_s or not (bounds := self.bounds(now)):
            return found
        self._held_again_at_s, self._next_at_s = now + HOLD_AGAIN_S, now
        for name, bound in bounds.items():
            tenant = self._tenants.get(name)  # it may be forgotten since the look
            if tenant is not None and tenant.has - bound >= 1.0:
                found[name] = int((tenant.has - bound) * tenant.sequences / tenant.has)  # the others hold their part
        return found
