"""Has a tenant used its tokens for this minute? A leaky bucket for each tenant, for a gateway without its store.

The store counts over all gateways by the same rule (`store/lua/spend.lua`). A gateway that does not reach it counts what it
serves itself, so that a tenant has its minute at each gateway and not without a limit.
"""

from collections import OrderedDict

MINUTE_S = 60.0
MAX_TENANTS = 4096
"""Buckets; beyond them the one that was used least recently is forgotten."""


class TokenMinutes:
    """The minutes of all tenants at this gateway. All methods take constant time."""

    def __init__(self) -> None:
        self._empty_at_s: OrderedDict[str, float] = OrderedDict()
        """By tenant: the instant at which its bucket is empty again."""

    def spend(self, now: float, tenant: str, tokens: int, per_minute: int, *, used: bool) -> float:
        """Books tokens; negative ones are given back. Returns 0, or the seconds until the tenant may come again. Tokens
        that are `used` already are always booked."""
        empty_at_s = max(self._empty_at_s.get(tenant, now), now)
        cost_s = tokens * MINUTE_S / per_minute
        # An empty bucket takes any call, however large: it could never come in otherwise.
        if not used and empty_at_s > now and empty_at_s + cost_s - now > MINUTE_S:
            return max(0.001, empty_at_s + min(cost_s, MINUTE_S) - now - MINUTE_S)
        self._empty_at_s[tenant] = max(empty_at_s + cost_s, now)
        self._empty_at_s.move_to_end(tenant)
        if len(self._empty_at_s) > MAX_TENANTS:
            self._empty_at_s.popitem(last=False)
        return 0.0

    def __contains__(self, tenant: str) -> bool:
        """Whether anything was booked for the tenant here since `take`."""
        return tenant in self._empty_at_s

    def take(self, now: float, tenant: str, per_minute: int) -> int:
        """Forgets the tenant; returns the tokens that are still in its bucket."""
        empty_at_s = self._empty_at_s.pop(tenant, now)
        return round(max(empty_at_s - now, 0.0) * per_minute / MINUTE_S)
