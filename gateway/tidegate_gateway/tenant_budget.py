"""What the requests of one tenant may hold of a budget that all tenants share: bytes of bodies, or calls.

The budget is bounded in sum. A tenant that is alone may hold twice as much as is free, so one that takes all it can get
leaves a third. Beside others a tenant may hold as much as is free: tenants that take all they can get, together or one
after the other, leave room for the requests of others (Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", 1998).
"""

import collections

ALONE, BESIDE = 2.0, 1.0
"""A tenant may hold so many times what is free, without and with others that hold something."""


class TenantBudget:
    """A budget in units such as bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.used = 0
        self._of_tenant: collections.Counter[str] = collections.Counter()

    def hold(self, tenant: str = "") -> "Held":
        """What one connection or call holds, nothing so far."""
        return Held(self, tenant)

    def add(self, tenant: str, units: int) -> None:
        self.used += units
        self._of_tenant[tenant] += units
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def fits(self, tenant: str) -> bool:
        """The tenant holds no more than it may hold."""
        own = self._of_tenant[tenant]
        return own <= (ALONE if own == self.used else BESIDE) * (self._most - self.used)


class Held:
    """What one connection or call holds of a budget."""

    __slots__ = ("_budget", "_tenant", "units")

    def __init__(self, budget: TenantBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self.units = 0

    def count_for(self, tenant: str) -> None:
        """All of it counts for this tenant from now on."""
        if tenant != self._tenant:
            units = self.units
            self.add(-units)
            self._tenant = tenant
            self.add(units)

    def add(self, units: int) -> None:
        """Holds so many units more, or fewer. What was released is not given back twice."""
        units = max(units, -self.units)
        self.units += units
        self._budget.add(self._tenant, units)

    @property
    def fits(self) -> bool:
        """The tenant holds no more than it may hold."""
        return self._budget.fits(self._tenant)

    def release(self) -> None:
        """Holds nothing any more."""
        self.add(-self.units)
