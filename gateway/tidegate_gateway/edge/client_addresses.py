"""How many connections the clients of each address, or of each network of IPv6, have to one port."""

import asyncio
import collections
import ipaddress

ONE_CLIENT_BITS = 64
"""Of an address of IPv6: a client has at least a network of this size, and so many addresses as it likes."""


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of the peer, without its port; "" for a peer that has none. Of IPv6 it is the peer's network."""
    return client_of(str((transport.get_extra_info("peername") or ("",))[0]))


def client_of(host: str) -> str:
    """The address, or the network of IPv6, that is one client."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return host if address.is_loopback else str(ipaddress.IPv6Network((address, ONE_CLIENT_BITS), strict=False))


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
