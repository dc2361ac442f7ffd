"""The instants on which all gateways of a pool agree. `priority` needs them, because engines compare the calls of different
gateways by it.

The wall clock of a gateway may be wrong, or step. So it is read once, at the start; from the first exchange on the clock of
the store counts. When that one steps, the instants follow slowly.
"""

from collections.abc import Callable

SLEW = 0.01
"""Seconds in each second by which the instants follow a clock that has stepped."""
LONGEST_EXCHANGE_S = 1.0
"""An exchange that took longer tells little of the instant at which the store looked at its clock."""


class PoolClock:
    """Seconds since 1970, as the store counts them. Two instants of one gateway differ by the time between them, within
    `SLEW`, but for the first exchange."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at_s = now = clock()
        self._ahead_s = self._wanted_s = wall() - now
        """What is added to the gateway's monotonic clock, and what should be."""
        self.knows_store = False
        """There has been an exchange."""

    def __call__(self) -> float:
        now = self._clock()
        most_s = SLEW * (now - self._seen_at_s)
        self._ahead_s += min(max(self._wanted_s - self._ahead_s, -most_s), most_s)
        self._seen_at_s = now
        return now + self._ahead_s

    def on_exchange(self, store_s: float, *, sent_at_s: float, answered_at_s: float) -> None:
        """The store's clock showed `store_s` between two instants of the gateway's monotonic clock."""
        if answered_at_s - sent_at_s > LONGEST_EXCHANGE_S:
            return
        self()
        self._wanted_s = store_s - (sent_at_s + answered_at_s) / 2
        if not self.knows_store:
            self.knows_store, self._ahead_s = True, self._wanted_s
