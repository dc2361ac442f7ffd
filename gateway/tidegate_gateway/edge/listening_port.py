"""The ports on which the gateway listens: their addresses, and how fast connections are accepted.

uvloop accepts one connection in each step of the event loop. While steps take a millisecond, a client would wait for as
many seconds as there are thousands of connections before its own. So with each connection that the event loop accepts,
`_Acceptor` takes those that wait behind it. A connection whose client has reset it by then is closed without a protocol,
which takes a tenth of the time.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

EVERY_ADDRESS = "::"
"""Every address of this machine, of IPv6 and of IPv4."""
BACKLOG = 4096
"""Connections that wait until they are accepted; the kernel asks clients beyond them to try again after a second."""
AT_ONCE = 64
"""Connections that one step of the event loop accepts, so that a burst does not delay what is open."""
GONE_AT_ONCE = 256
"""Connections of clients that are gone which one step of the event loop closes."""
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
"""States of a connection (Linux, `include/net/tcp_states.h`): the peer has reset it; the peer will send nothing more."""

Factory = Callable[[], asyncio.Protocol]


class ListeningPort:
    """A port that is open, until it is closed."""

    def __init__(self, server: asyncio.Server, acceptor: "_Acceptor") -> None:
        self._server = server
        self._acceptor = acceptor
        self.port: int = server.sockets[0].getsockname()[1]

    def shown(self, host: str) -> str:
        """The address as host:port, with brackets around an IPv6 address."""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def close(self) -> None:
        """Stops listening without a reset: clients that have connected by now are accepted."""
        self._server.close()
        await self._acceptor.close()


class _Acceptor:
    """The protocol factory of a port. It takes the connections that wait behind each one."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._listeners: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        self._take(AT_ONCE - 1)
        return self._factory()

    def listens(self, server: asyncio.Server) -> None:
        """These are the sockets of the port; they may have connections that wait."""
        for listener in server.sockets:
            own = socket.socket(fileno=os.dup(listener.fileno()))
            own.setblocking(False)
            self._listeners.append(own)

    async def close(self) -> None:
        """Takes those that wait; the port is closed in the end."""
        for _ in range(0, BACKLOG, AT_ONCE):
            if not self._take(AT_ONCE):
                break
            if self._opening:
                await asyncio.wait(self._opening)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _take(self, at_most: int) -> int:
        """Returns how many were taken or closed. What fails, such as a process without descriptors, is left to the event
        loop."""
        taken = gone = 0
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # none waits any more
                while taken < at_most and gone < GONE_AT_ONCE:
                    accepted = listener.accept()[0]
                    if _is_gone(accepted):
                        accepted.close()
                        gone += 1
                        continue
                    opening = asyncio.ensure_future(self._open(accepted))
                    self._opening.add(opening)
                    opening.add_done_callback(self._opening.discard)
                    taken += 1
        return taken + gone

    async def _open(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its client is gone
            await asyncio.get_running_loop().connect_accepted_socket(self._factory, accepted)


def _is_gone(accepted: socket.socket) -> bool:
    """Whether the client has reset the connection, or has ended it without a byte."""
    try:
        state = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state == _TCP_CLOSE or (state == _TCP_CLOSE_WAIT and not accepted.recv(1, socket.MSG_PEEK))
    except OSError:
        return True


async def open_port(factory: Factory, host: str, port: int) -> ListeningPort:
    """Listens on host:port; port 0 takes a free one. Raises `OSError`, which names the address, when the port is taken."""
    acceptor = _Acceptor(factory)
    # asyncio's servers take None for every address: "::" alone would leave out IPv4.
    try:
        server = await asyncio.get_running_loop().create_server(
            acceptor, None if host == EVERY_ADDRESS else host, port, backlog=BACKLOG
        )
    except OSError as error:
        number = error.errno or 0  # negative for a host that is not known
        reason = os.strerror(number).lower() if number > 0 else error.strerror
        raise OSError(error.errno, f"{host}:{port}: {reason}") from None
    acceptor.listens(server)
    return ListeningPort(server, acceptor)
