"""How many entries does each tenant have, and which tenant has the most?

Clients may invent tenants, so nothing here looks at all of them.
"""

from collections import OrderedDict


class TenantSizes:
    """The tenants with entries, by how many these are. All methods take constant time."""

    def __init__(self) -> None:
        self._of_size: dict[int, OrderedDict[str, None]] = {}
        """The tenants with so many entries, the one that was observed least recently first."""
        self._largest = 0
        """The most entries of one tenant."""

    def observed(self, tenant: str, size: int) -> None:
        """The tenant was observed, and still has `size` entries, at least one."""
        self._of_size[size].move_to_end(tenant)

    def resized(self, tenant: str, before: int, after: int) -> None:
        """The tenant has one entry more or less."""
        if before:
            peers = self._of_size[before]
            del peers[tenant]
            if not peers:
                del self._of_size[before]
        if after:
            self._of_size.setdefault(after, OrderedDict())[tenant] = None
        if after > self._largest or (before == self._largest and before not in self._of_size):
            self._largest = after

    def largest(self) -> str | None:
        """The tenant with the most entries, of several the one that was observed least recently; None if none has any."""
        return next(iter(self._of_size[self._largest])) if self._of_size else None
