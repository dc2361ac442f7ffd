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

    def __init__(self) -> None:
        self._next_at_s = -math.inf
        self._held_again_at_s = -math.inf
        """The earliest instant at which calls may be held again."""
        self._bounds: Mapping[str, float] = {}
        """Those at the last look, if some tenant had more than its bound."""

    def is_over(self, now: float) -> None:
        """Something has happened that changes what the look showed."""
        self._next_at_s = now

    def bounds(
        self, now: float, tenants: Mapping[str, TenantRecord], find: Callable[[float], Mapping[str, float]]
    ) -> Mapping[str, float]:
        """The bounds of all tenants if some tenant has more than its bound, as far as the last look showed; else empty."""
        if now >= self._next_at_s:
            self._next_at_s = now + LOOK_S
            found = find(now)  # a tenant of it may be forgotten
            unfair = [name for name, bound in found.items() if name in tenants and tenants[name].has > bound]
            self._bounds = found if unfair else {}
        return self._bounds

    def may_hold_again(self, now: float) -> bool:
        """Whether calls were not held again of late."""
        return now >= self._held_again_at_s

    def on_held_again(self, now: float) -> None:
        """Calls are held again now, so what the look showed is over."""
        self._held_again_at_s, self._next_at_s = now + HOLD_AGAIN_S, now
