"""Which tenants does a gateway remember, and which one does it forget for a new one?

Clients may invent tenants, so no call looks at all of them. What the other gateways are told does.
"""

import heapq
from collections import OrderedDict

from tidegate_policy.admit.tenant_load import LEAST_RATE, MOST_TOLD, TenantLoad
from tidegate_policy.admit.tenant_record import TenantRecord

MAX_TENANTS = 1000
"""Tenants that are remembered; those that have calls here always are."""


class KnownTenants:
    """The records of the tenants, and those of them that may be forgotten."""

    def __init__(self) -> None:
        self.records: OrderedDict[str, TenantRecord] = OrderedDict()
        """By tenant, the one seen least recently first."""
        self._seen = 0
        """How often a tenant was seen."""
        self._idle: OrderedDict[str, None] = OrderedDict()
        """The tenants that want nothing, the one first that was not seen, and wanted nothing, for the longest time."""

    def add(self, name: str, tenant: TenantRecord) -> str | None:
        """The tenant, which wants nothing yet, is remembered. Another one that wants nothing may be forgotten for it: its
        name."""
        forgotten: str | None = None
        if len(self.records) >= MAX_TENANTS and self._idle:
            forgotten = self._idle.popitem(last=False)[0]
            del self.records[forgotten]
        self.records[name] = tenant
        self._idle[name] = None
        self._number(tenant)
        return forgotten

    def seen(self, name: str) -> None:
        """A call of the tenant has come in."""
        self.records.move_to_end(name)
        self._number(self.records[name])
        if name in self._idle:
            self._idle.move_to_end(name)

    def wants(self, name: str, wanted: int) -> None:
        """The tenant wants so many places from now on."""
        if wanted:
            self._idle.pop(name, None)
        elif name not in self._idle:
            self._idle[name] = None

    def load(self, now: float) -> dict[str, TenantLoad]:
        """What the other gateways are told: of those tenants that have and want the most here, and then of those that sent
        work of late."""
        busy: list[tuple[int, str]] = []
        quiet: list[str] = []
        for name, tenant in self.records.items():
            wanted = tenant.tell()
            if wanted:
                busy.append((wanted, name))
            elif tenant.sent_s:
                quiet.append(name)
        told = {name: self.records[name].load(now) for _, name in heapq.nlargest(MOST_TOLD, busy, key=_wanted)}
        for name in quiet:
            if len(told) == MOST_TOLD:
                break
            if self.records[name].rate(now) > LEAST_RATE:
                told[name] = self.records[name].load(now)
        return told

    def _number(self, tenant: TenantRecord) -> None:
        self._seen += 1
        tenant.seen_as = self._seen


def _wanted(entry: tuple[int, str]) -> int:
    return entry[0]
