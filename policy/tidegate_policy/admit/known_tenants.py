"""Which tenants does a gateway remember, and which one does it forget for a new one?

Clients may invent tenants, so no step here looks at all of them.
"""

from collections import OrderedDict

from tidegate_policy.admit.tenant_record import TenantRecord

MAX_TENANTS = 1000
"""Tenants that are remembered; those that have calls here always are."""


class KnownTenants:
    """The records of the tenants, and those of them that may be forgotten."""

    def __init__(self) -> None:
        self.records: OrderedDict[str, TenantRecord] = OrderedDict()
        """By tenant, the one seen least recently first."""
        self._idle: OrderedDict[str, None] = OrderedDict()
        """The tenants that want nothing, the one first that was not seen, and wanted nothing, for the longest time."""

    def add(self, name: str, tenant: TenantRecord) -> None:
        """The tenant, which wants nothing yet, is remembered. Another one that wants nothing may be forgotten for it."""
        if len(self.records) >= MAX_TENANTS and self._idle:
            del self.records[self._idle.popitem(last=False)[0]]
        self.records[name] = tenant
        self._idle[name] = None

    def seen(self, name: str) -> None:
        """A call of the tenant has come in."""
        self.records.move_to_end(name)
        if name in self._idle:
            self._idle.move_to_end(name)

    def wants(self, name: str, wanted: int) -> None:
        """The tenant wants so many places from now on."""
        if wanted:
            self._idle.pop(name, None)
        elif name not in self._idle:
            self._idle[name] = None
