"""How many calls of each tenant are held, and which tenant holds the most for its weight?

A full queue asks this at each arrival, and clients may invent tenants, so no arrival looks at all of them.
"""

import heapq
from collections.abc import Callable

SLACK_ENTRIES = 64
"""Entries that count no more, tolerated beyond one for each tenant with held calls."""

_Entry = tuple[float, int, str]
"""Held calls over weight, negative; how late the tenant was seen; its name."""


class HeldTenants:
    """The tenants with held calls. A change costs O(log tenants), and so does a look for each change before it."""

    def __init__(self, standing: Callable[[str], tuple[float, int]]) -> None:
        """`standing` is the weight of a tenant, and a number that is higher for tenants seen later."""
        self._standing = standing
        self._calls: dict[str, int] = {}
        """Held calls of each tenant; no entry is 0."""
        self._entry_of: dict[str, _Entry] = {}
        """The entry of each of these tenants that counts. It is never behind the place that the tenant has by now."""
        self._entries: list[_Entry] = []
        """A heap. Entries that count no more are skipped, and removed when they are many."""

    def count(self, name: str, more: int) -> None:
        """The tenant has so many held calls more, or fewer if that is negative."""
        calls = self._calls.get(name, 0) + more
        if calls:
            self._calls[name] = calls
            if more > 0:
                self.changed(name)
        else:
            del self._calls[name], self._entry_of[name]

    def changed(self, name: str) -> None:
        """The weight of the tenant, or the number of its held calls, has changed. It may be the first now."""
        if name in self._calls:
            entry, before = self._entry(name), self._entry_of.get(name)
            if before is None or entry < before:
                self._push(entry)

    def with_more_than(self, name: str) -> str | None:
        """The tenant with the most held calls for its weight, of several the one that was not seen for longest; None if it
        has no more than the tenant `name`, or no tenant has any."""
        entries = self._entries
        while entries:
            first = entries[0]
            most = first[2]
            if self._entry_of.get(most) == first:
                entry = self._entry(most)
                if entry == first:
                    own = self._entry(name)[0] if name in self._calls else 0.0
                    return None if own <= first[0] else most
                heapq.heappop(entries)
                self._push(entry)
            else:
                heapq.heappop(entries)
        return None

    def _entry(self, name: str) -> _Entry:
        weight, seen = self._standing(name)
        return -(self._calls[name] / weight), seen, name

    def _push(self, entry: _Entry) -> None:
        self._entry_of[entry[2]] = entry
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._calls) + SLACK_ENTRIES:
            self._entries[:] = self._entry_of.values()
            heapq.heapify(self._entries)
