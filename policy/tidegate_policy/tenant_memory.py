"""What is remembered of all tenants, within one bound, so that no tenant makes the memory of another one shorter.

Clients choose names of stages, classes, sessions and workflows, so what is known by such names needs a bound. One list for
all that forgets the oldest entry lets a tenant with many names push out what is known of the others. Here the tenant with
the most entries gives way, and of its entries the one that was observed least recently. So a tenant loses nothing while it
has less than its equal part of the memory, and one that is alone may use all of it. Tenants with equally many entries take
turns.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from tidegate_policy import tenant_sizes

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TenantMemory(Generic[K, V]):
    """Entries by tenant and key. All methods but `keys` take constant time."""

    def __init__(self, most: int) -> None:
        """`most` entries of all tenants, at least 1."""
        self._most = most
        self._count = 0
        self._entries: dict[str, OrderedDict[K, V]] = {}
        """The entries of each tenant that has some, least recently observed first."""
        self._sizes = tenant_sizes.TenantSizes()

    def __len__(self) -> int:
        return self._count

    def get(self, tenant: str, key: K) -> V | None:
        """What is remembered; None if there is nothing."""
        entries = self._entries.get(tenant)
        return None if entries is None else entries.get(key)

    def keys(self) -> list[tuple[str, K]]:
        """Every tenant and key."""
        return [(tenant, key) for tenant, entries in self._entries.items() for key in entries]

    def put(self, tenant: str, key: K, value: V) -> tuple[str, K, V] | None:
        """The entry was observed, and has this value now. Returns the entry that was forgotten for it, if one was."""
        entries = self._entries.get(tenant)
        if entries is None:
            entries = self._entries[tenant] = OrderedDict()
        before = len(entries)
        entries[key] = value
        if len(entries) == before:
            entries.move_to_end(key)
            self._sizes.observed(tenant, before)
            return None
        self._count += 1
        self._resized(tenant, before, before + 1)
        return self._forget_one() if self._count > self._most else None

    def pop(self, tenant: str, key: K) -> V | None:
        """Forgets the entry, and returns it; None if there is none."""
        entries = self._entries.get(tenant)
        if entries is None or key not in entries:
            return None
        value = entries.pop(key)
        self._count -= 1
        self._resized(tenant, len(entries) + 1, len(entries))
        return value

    def _forget_one(self) -> tuple[str, K, V]:
        tenant = self._sizes.largest()
        assert tenant is not None  # more entries than may be
        entries = self._entries[tenant]
        key, value = entries.popitem(last=False)
        self._count -= 1
        self._resized(tenant, len(entries) + 1, len(entries))
        return tenant, key, value

    def _resized(self, tenant: str, before: int, after: int) -> None:
        """The tenant has one entry more or less."""
        self._sizes.resized(tenant, before, after)
        if not after:
            del self._entries[tenant]
