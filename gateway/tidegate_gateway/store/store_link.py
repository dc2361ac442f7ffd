"""Is there a store, and did it answer last time? One value that all parts of a gateway share."""

from dataclasses import dataclass

from tidegate_gateway.store import store_contract


@dataclass(slots=True)
class StoreLink:
    """The store of this gateway, and whether it is up. While it is down no request waits for it."""

    store: store_contract.Store | None
    up: bool = False
    """The last exchange or command reached the store."""

    def __post_init__(self) -> None:
        self.up = self.store is not None
