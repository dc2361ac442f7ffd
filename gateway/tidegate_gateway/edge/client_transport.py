"""What the transport of a client needs beyond reading and writing: TLS, and a look whether the client is still there."""

import asyncio
import select
import ssl
from typing import Any

CLOSING_S = 2.0
"""For a client to answer the end of an encrypted connection."""


async def encrypted(
    plain: asyncio.Transport,
    protocol: asyncio.Protocol,
    encryption: ssl.SSLContext,
    *,
    early: bytes,
    handshake_s: float,
) -> asyncio.Transport | None:
    """The transport after a TLS handshake, of which the client has sent the `early` bytes already; None if the client fails
    it or does not end it in time."""
    loop = asyncio.get_running_loop()
    if early:
        loop.call_soon(_feed, plain, early)
    try:
        return await loop.start_tls(
            plain,
            protocol,
            encryption,
            server_side=True,
            ssl_handshake_timeout=handshake_s,
            ssl_shutdown_timeout=CLOSING_S,
        )
    except OSError:  # errors of TLS among them
        return None


def _feed(plain: asyncio.Transport, early: bytes) -> None:
    """Gives bytes to the TLS protocol of the transport. uvloop reads from a new connection although `connection_made` has
    paused it, so the beginning of a handshake may have come before TLS was there."""
    protocol: Any = plain.get_protocol()
    while early:
        buffer = protocol.get_buffer(len(early))
        size = min(len(buffer), len(early))
        buffer[:size] = early[:size]
        protocol.buffer_updated(size)
        early = early[size:]


def hung_up(transport: asyncio.Transport) -> bool:
    """The client has closed its side, which the transport does not notice while it reads nothing."""
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return True
    look = select.poll()
    look.register(descriptor, select.POLLRDHUP)
    return bool(look.poll(0))
