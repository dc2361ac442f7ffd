"""What the transport of a client needs beyond reading and writing: TLS, and a look whether the client is still there."""

import asyncio
import select
import ssl
from collections.abc import Callable
from typing import Any

CLOSING_S = 2.0
"""For a client to answer the end of an encrypted connection."""


class TlsHandshake(asyncio.Protocol):
    """Stands in the place of a connection until its client has made the TLS handshake."""

    def __init__(
        self,
        plain: asyncio.Transport,
        connection: asyncio.Protocol,
        begin: Callable[[asyncio.Transport], None],
        encryption: ssl.SSLContext,
        *,
        within_s: float,
    ) -> None:
        """`begin` gets the encrypted transport, and the connection the bytes after that. The connection is lost when the
        client fails the handshake, or takes longer than `within_s` for it."""
        self._plain = plain
        self._connection = connection
        self._begin = begin
        self._early = bytearray()
        """What came before TLS was there, and then what came before `begin`."""
        plain.set_protocol(self)
        plain.pause_reading()
        self.task = asyncio.get_running_loop().create_task(self._run(encryption, within_s))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    async def _run(self, encryption: ssl.SSLContext, within_s: float) -> None:
        transport = None
        try:
            transport = await self._encrypted(encryption, within_s)
        finally:
            if transport is None or self._plain.is_closing():
                self._plain.abort()
                self._connection.connection_lost(None)
        if transport is not None and not self._plain.is_closing():
            transport.set_protocol(self._connection)
            self._begin(transport)
            if self._early:
                self._connection.data_received(bytes(self._early))

    async def _encrypted(self, encryption: ssl.SSLContext, within_s: float) -> asyncio.Transport | None:
        loop = asyncio.get_running_loop()
        if self._early:
            loop.call_soon(_feed, self._plain, bytes(self._early))
            self._early.clear()
        try:
            return await loop.start_tls(
                self._plain,
                self,
                encryption,
                server_side=True,
                ssl_handshake_timeout=within_s,
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
