"""Does the store still know the lease that it acknowledged last? If not, it has lost writes."""


class KnownLeases:
    """The leases of one gateway as the store acknowledged them.

    An exchange renews the gateway's lease. A store that fails over to a replica, or that starts again without its last
    writes, answers the next exchange with an older lease or with none. Instants are milliseconds of the store's clock."""

    def __init__(self) -> None:
        self._first_ms: int | None = None
        self._until_ms = 0

    def lost_s(self, *, now_ms: int, lease_ms: int, before_ms: int, others: int) -> float | None:
        """Takes the answer to an exchange. The seconds whose writes the store has lost; None if it lost none.

        `before_ms` is the end of the lease that the store knew before the exchange (0 = none), `others` the number of
        leases of other gateways. They remove a lease that has ended, so only a lease that still runs, or one that nobody
        could remove, is missed."""
        first_ms, known_ms = self._first_ms, self._until_ms
        self._until_ms = now_ms + lease_ms
        if first_ms is None:
            self._first_ms = self._until_ms
            return None
        if before_ms:
            return (known_ms - before_ms) / 1000 if before_ms < known_ms else None
        if known_ms < now_ms and others:
            return None
        self._first_ms = self._until_ms
        return (known_ms - first_ms) / 1000
