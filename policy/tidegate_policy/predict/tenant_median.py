"""The middle of one value for each tenant: what is expected of a tenant of whom nothing is known yet.

Each tenant counts once, however many calls it makes. So what a tenant shows changes what is expected of a newcomer by one
place in the order, and false values count for nothing while fewer than half of the values are false.
"""

import bisect


class TenantMedian:
    """The values in their order. All methods take constant time, but for the moves of a short list."""

    __slots__ = ("_ordered", "_usual")

    def __init__(self, usual: float | None = None) -> None:
        """`usual` is one more value, which the middle prefers; without it the middle is the larger one of two."""
        self._usual = usual
        self._ordered: list[float] = [] if usual is None else [usual]

    def __len__(self) -> int:
        """The values, with the usual one."""
        return len(self._ordered)

    def change(self, before: float | None, after: float | None) -> None:
        """The value of one tenant was `before`, and is `after` now; None = it has none."""
        if before == after:
            return
        if before is not None:
            del self._ordered[bisect.bisect_left(self._ordered, before)]
        if after is not None:
            bisect.insort(self._ordered, after)

    @property
    def middle(self) -> float:
        """The middle value; of two the one that is nearer to the usual value. There is at least one value."""
        middle = len(self._ordered) // 2
        if len(self._ordered) % 2 == 0 and self._usual is not None and self._usual <= self._ordered[middle - 1]:
            middle -= 1
        return self._ordered[middle]
