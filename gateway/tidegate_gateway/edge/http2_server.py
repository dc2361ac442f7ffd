"""What do the connections of one HTTP/2 port share? The methods, the bounds, and which connection makes room for a new
one."""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from tidegate_gateway import reading_turns, tenant_budget
from tidegate_gateway.edge import (
    client_addresses,
    http2_connection,
    http2_stream,
    listening_port,
    tls_handshake,
    unread_answers,
)

logger = logging.getLogger("tidegate.gateway")

LOOK_S = 1.0
"""Between two looks for connections that bring nothing."""
TOLD_S = 10.0
"""Between two lines of the log about peers that break the protocol."""


Look = Callable[[], Awaitable[object]]
Step = Callable[[Look], Awaitable[object]]
"""Runs one step of a background loop, and raises nothing but a cancellation (`background_loop`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one port."""

    message_bytes: int
    streams: int
    """Of one connection."""
    connections: int
    connections_per_address: int
    handshake_s: float = 10.0
    """For TLS, and for the first bytes of HTTP/2."""
    idle_s: float | None = None
    """A connection without streams ends after so long; None = never."""


class Server:
    """The streams of all connections to one port. It is the protocol factory of a listening socket."""

    def __init__(
        self,
        methods: Mapping[str, Callable[[http2_stream.Stream], http2_stream.Handler]],
        bounds: Bounds,
        unread: unread_answers.UnreadAnswers,
        partial: tenant_budget.TenantBudget,
        *,
        encryption: ssl.SSLContext | None = None,
        takes_compressed: bool = False,
        takes_plain: bool = False,
    ) -> None:
        """`methods` has the handler's maker for each path, such as /package.Service/Method. `partial` counts the bytes of
        messages that have not arrived as a whole. With `takes_compressed` the handlers get messages as they came. With
        `takes_plain` peers may do without the `encryption`."""
        self.methods = methods
        self.bounds = bounds
        self.unread = unread
        self.encryption = encryption
        self.takes_compressed = takes_compressed
        self.takes_plain = takes_plain
        self.partial = partial
        self.connections: dict[http2_connection.Connection, None] = {}
        self.unoccupied: dict[http2_connection.Connection, None] = {}
        """The connections without streams; the one that has had none for longest comes first."""
        self.is_leaving = False
        self.turns = reading_turns.ReadingTurns()
        self.handshakes = tls_handshake.HandshakeLine(self.turns)
        self._addresses = client_addresses.ClientAddresses(bounds.connections_per_address)
        self._told_at_s = -TOLD_S

    def __call__(self) -> "http2_connection.Connection":
        return http2_connection.Connection(self)

    def opened(self, connection: "http2_connection.Connection") -> bool:
        """A peer connected; False if there are too many connections of its address, or in all. One without streams makes
        room."""
        if not self._addresses.has_room(connection.address):
            return False
        if len(self.connections) >= self.bounds.connections:
            idle = next(iter(self.unoccupied), None)
            if idle is None:
                return False
            idle.end()
        self.connections[connection] = None
        self.unoccupied[connection] = None
        self._addresses.opened(connection.address)
        return True

    def is_busy(self, connection: "http2_connection.Connection") -> None:
        """The connection has a stream."""
        self.unoccupied.pop(connection, None)

    def is_idle(self, connection: "http2_connection.Connection") -> None:
        """The connection has no stream any more."""
        if connection in self.connections:
            self.unoccupied[connection] = None

    def closed(self, connection: "http2_connection.Connection") -> None:
        """A connection is gone, or will be soon. One that is not counted any more is ignored."""
        if connection in self.connections:
            del self.connections[connection]
            self.unoccupied.pop(connection, None)
            self._addresses.closed(connection.address)

    def broken(self, why: Exception) -> None:
        """Tells of a peer that breaks the protocol, unless another one was told of just now."""
        now_s = time.monotonic()
        if now_s - self._told_at_s >= TOLD_S:
            self._told_at_s = now_s
            logger.warning("a connection over HTTP/2 breaks the protocol: %s", why)

    async def look(self) -> None:
        """Ends the connections that bring nothing now. Looks at all of them, then raises the first exception of a look."""
        now_s, first = time.monotonic(), None
        for connection in list(self.connections):
            try:
                connection.look(now_s)
            except Exception as error:  # noqa: BLE001  # raised once all connections were looked at
                first = first or error
        if first is not None:
            raise first

    def ask_to_leave(self) -> None:
        """Asks all peers to open further streams elsewhere. Those that they have already opened are served."""
        self.is_leaving = True
        for connection in self.connections:
            connection.ask_to_leave()

    def leave(self) -> None:
        """Tells all peers that no further stream is served."""
        for connection in self.connections:
            connection.leave()


@contextlib.asynccontextmanager
async def listening(
    server: Server, host: str, port: int, step: Step, ended: Callable[[], bool], within_s: float
) -> AsyncIterator[str]:
    """An open port; its address as host:port. `step` runs each look at the connections. In the end no further stream is
    served, and those that are have `within_s` seconds until `ended`. Raises `OSError` when the port is taken."""
    loop = asyncio.get_running_loop()
    opened = await listening_port.open_port(
        server, host, port, most_waiting=listening_port.most_waiting(server.bounds.connections), answers_ended=False
    )
    looks = loop.create_task(_looks(server, step))
    try:
        yield opened.shown(host)
    finally:
        looks.cancel()
        await opened.close()
        server.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not ended():
                    await asyncio.sleep(0.01)
        for connection in list(server.connections):
            connection.close()


async def _looks(server: Server, step: Step) -> None:
    """Looks at the connections again and again, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        await step(server.look)
