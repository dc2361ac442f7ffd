"""The memory that the bodies of requests take, while they arrive and until they are answered.

All bodies of a port are bounded in sum. A tenant may have twice as much as is free, so a tenant that fills the memory
leaves a third of it, and bodies of the others still come in (Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", 1998).
"""

import collections

PART = 2.0
"""A tenant's bodies may have so many times the bytes that are free."""


class BodyBudget:
    """The bodies of one port."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.bytes = 0
        self._of_tenant: collections.Counter[str] = collections.Counter()

    def hold(self, tenant: str = "") -> "Bodies":
        """The bodies of one connection or call, none so far."""
        return Bodies(self, tenant)

    def add(self, tenant: str, size: int) -> None:
        self.bytes += size
        self._of_tenant[tenant] += size
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def fits(self, tenant: str) -> bool:
        """The tenant has no more than it may have."""
        return self._of_tenant[tenant] <= PART * (self._most_bytes - self.bytes)


class Bodies:
    """The bodies of one connection or call."""

    __slots__ = ("_budget", "_tenant", "bytes")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self.bytes = 0

    def of(self, tenant: str) -> None:
        """All of them count for this tenant."""
        if tenant != self._tenant:
            size = self.bytes
            self.add(-size)
            self._tenant = tenant
            self.add(size)

    def add(self, size: int) -> None:
        """Counts so many bytes more, or less."""
        self.bytes += size
        self._budget.add(self._tenant, size)

    @property
    def fits(self) -> bool:
        """The tenant has no more than it may have."""
        return self._budget.fits(self._tenant)

    def release(self) -> None:
        """There are none any more."""
        self.add(-self.bytes)
