"""A look whether the client of a transport is still there."""

import asyncio
import select


def hung_up(transport: asyncio.Transport) -> bool:
    """The client has closed its side, which the transport does not notice while it reads nothing."""
    connected = transport.get_extra_info("socket")
    if connected is None or (descriptor := connected.fileno()) < 0:  # the transport is closed
        return True
    look = select.poll()
    look.register(descriptor, select.POLLRDHUP)
    return bool(look.poll(0))
