"""Is there a store, and did it answer last time? One value that all parts of a gateway share."""

from dataclasses import dataclass

from tidegate_gateway.store import store_contract


@dataclass(slots=True)
class StoreLink:
    """The store of this gateway, and whether it is up. While it is down no request waits for it."""

    store: store_contract.Store | None
    up: bool = False
    """The last exchange reached the store, and so did every command since that was not only slow."""

    def __post_init__(self) -> None:
        self.up = self.store is not None

    @property
    def reachable(self) -> bool | None:
        """Whether the store answers; None = there is none."""
        return None if self.store is None else self.up

    def failed(self, error: store_contract.Unavailable) -> None:
        """A command of a request failed. A slow one says nothing of others; the exchange finds out whether the store
        hangs."""
        if not isinstance(error, store_contract.Slow):
            self.up = False
