"""How many connections the clients of each address have to one port."""

import asyncio
import collections


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of the peer, without its port; "" for a peer that has none."""
    return str((transport.get_extra_info("peername") or ("",))[0])


class ClientAddresses:
    """The connections from each address. Those from this machine are not bounded, because a local proxy brings all clients
    from there."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: collections.Counter[str] = collections.Counter()

    def has_room(self, address: str) -> bool:
        """The address may have one connection more."""
        is_local = address.startswith("127.") or address in ("::1", "")
        return is_local or self._connections[address] < self._most

    def opened(self, address: str) -> None:
        """Counts one connection more."""
        self._connections[address] += 1

    def closed(self, address: str) -> None:
        """A connection that was counted is gone."""
        self._connections[address] -= 1
        if not self._connections[address]:
            del self._connections[address]
