"""The ports on which the gateway listens: their addresses, and how fast connections are accepted.

uvloop accepts one connection in each step of the event loop. While steps take a millisecond, a client would wait for as
many seconds as there are thousands of connections before its own. So with each connection that the event loop accepts,
`_Acceptor` takes those that wait behind it, which costs little, and opens a few in each step. The kernel knows no turns:
its queue must be empty soon, or a client waits for all of a flood that came before it. A connection whose client is gone
is closed without a protocol, which takes a tenth of the time.
"""

import asyncio
import contextlib
import enum
import os
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from tidegate_gateway import turn_line
from tidegate_gateway.edge import client_addresses

EVERY_ADDRESS = "::"
"""Every address of this machine, of IPv6 and of IPv4."""
BACKLOG = 4096
"""Connections that wait until they are accepted; the kernel asks clients beyond them to try again after a second."""
LEAST_AT_ONCE, MOST_AT_ONCE, OPENED_PER_S = 16, 128, 2500
"""Connections that one step of the event loop opens: few, so that a flood does not delay what is open, and more where steps
take long for other reasons, so that a burst of clients behind one address waits for few of them (decision 57)."""
BURST = BACKLOG
"""Connections that are opened at MOST_AT_ONCE in a step, and not at OPENED_PER_S, after a time in which few came."""
TAKEN_AT_ONCE = 256
"""Connections that one step takes from the kernel, and so many of each line whose clients are gone or have ended are passed
over."""
MOST_ENDED = 1024
"""Connections that wait behind all others, because their clients have sent something and ended their side; at most a
quarter of those that may wait."""
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
"""States of a connection (Linux, `include/net/tcp_states.h`): the peer has reset it; the peer will send nothing more."""

Factory = Callable[[], asyncio.Protocol]


class _Accepted(NamedTuple):
    """A connection that waits to be opened."""

    address: str
    socket: socket.socket


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
    """The protocol factory of a port. It takes the connections that wait behind each one, and opens them in turns of their
    addresses, so that a flood from one address delays no other."""

    def __init__(self, factory: Factory, *, most_waiting: int, answers_ended: bool) -> None:
        self._factory = factory
        self._most_waiting = most_waiting
        self._answers_ended = answers_ended
        self._listeners: list[socket.socket] = []
        self._waiting: turn_line.TurnLine[_Accepted] = turn_line.TurnLine()
        """The connections that wait to be opened, by address."""
        self._ended: turn_line.TurnLine[_Accepted] = turn_line.TurnLine()
        """Those whose client has sent something and ended its side: few honest clients do, so all others come first."""
        self._step: asyncio.Handle | None = None
        self._in_turn = float(BURST)
        """As many of the waiting connections are opened before those that come at OPENED_PER_S."""
        self._stepped_at_s = time.monotonic()
        self._opening: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        self._take()
        if self._step is None and self._some_wait():
            self._go_on()
        return self._factory()

    def listens(self, server: asyncio.Server) -> None:
        """These are the sockets of the port; they may have connections that wait."""
        for listener in server.sockets:
            own = socket.socket(fileno=os.dup(listener.fileno()))
            own.setblocking(False)
            self._listeners.append(own)

    async def close(self) -> None:
        """Takes those that have connected, closes the port, and opens those that wait. Later clients are refused, so that a
        flood does not keep it open."""
        for _ in range(0, len(self._listeners) * BACKLOG, TAKEN_AT_ONCE):
            if not self._take():
                break
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        while self._some_wait() or self._opening:
            self._open_some()
            if self._opening:
                await asyncio.wait(self._opening)
        if self._step is not None:
            self._step.cancel()

    def _go_on(self) -> None:
        """One step: opens some of the connections, and takes those that have come."""
        self._step = None
        self._open_some()
        self._take()
        if self._some_wait():
            self._step = asyncio.get_running_loop().call_soon(self._go_on)

    def _some_wait(self) -> bool:
        return bool(self._waiting or self._ended)

    def _take(self) -> int:
        """Returns how many were taken or closed. What fails, such as a process without descriptors, is left to the event
        loop."""
        taken = 0
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # none waits any more
                while taken < TAKEN_AT_ONCE:
                    connection, peer = listener.accept()
                    taken += 1
                    side = _side_of(connection, answers_ended=self._answers_ended)
                    if side is _Side.GONE:
                        connection.close()
                        continue
                    accepted = _Accepted(client_addresses.client_of(peer[0]), connection)
                    if side is _Side.ENDED:
                        self._postpone(accepted)
                    else:
                        self._join(accepted)
        return taken

    def _join(self, accepted: _Accepted) -> None:
        """If too many wait, one that has ended is closed, or the last one of a long line."""
        self._waiting.add(accepted.address, accepted)
        if len(self._waiting) + len(self._ended) > self._most_waiting:
            dropped = self._ended.pop() if self._ended else self._waiting.shorten(accepted.address)
            dropped.socket.close()

    def _postpone(self, accepted: _Accepted) -> None:
        """If too many have ended, the last one of a long line is closed."""
        self._ended.add(accepted.address, accepted)
        if len(self._ended) > min(MOST_ENDED, max(self._most_waiting // 4, 1)):
            self._ended.shorten(accepted.address).socket.close()

    def _open_some(self) -> None:
        before_s, self._stepped_at_s = self._stepped_at_s, time.monotonic()
        self._in_turn = min(self._in_turn + OPENED_PER_S * (self._stepped_at_s - before_s), BURST)
        most = int(min(max(self._in_turn, LEAST_AT_ONCE), MOST_AT_ONCE))
        opened = self._open_from(self._waiting, most)
        opened += self._open_from(self._ended, 1 if self._waiting else LEAST_AT_ONCE)
        self._in_turn = max(self._in_turn - opened, 0)

    def _open_from(self, line: turn_line.TurnLine[_Accepted], most: int) -> int:
        """Returns how many were opened."""
        opened = passed = 0
        while line and opened < most and passed < TAKEN_AT_ONCE:
            accepted = line.pop()
            side = _side_of(accepted.socket, answers_ended=self._answers_ended)
            if side is _Side.GONE:
                accepted.socket.close()
                passed += 1
            elif side is _Side.ENDED and line is self._waiting:
                self._postpone(accepted)
                passed += 1
            else:
                opening = asyncio.ensure_future(self._open(accepted.socket))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
                opened += 1
        return opened

    async def _open(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its client is gone
            await asyncio.get_running_loop().connect_accepted_socket(self._factory, accepted)


class _Side(enum.Enum):
    """What the client's side of a connection is."""

    OPEN = enum.auto()
    ENDED = enum.auto()
    """It has sent something and will send nothing more; it may read an answer."""
    GONE = enum.auto()


def _side_of(accepted: socket.socket, *, answers_ended: bool) -> _Side:
    """Without `answers_ended` a client that sends nothing more is gone."""
    try:
        state = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == _TCP_CLOSE_WAIT:
            return _Side.ENDED if answers_ended and accepted.recv(1, socket.MSG_PEEK) else _Side.GONE
        return _Side.GONE if state == _TCP_CLOSE else _Side.OPEN
    except OSError:
        return _Side.GONE


def most_waiting(connections: int) -> int:
    """Of a port that takes so many connections: half as many, for which the open files suffice (`open_files`)."""
    return max(connections // 2, 1)


async def open_port(
    factory: Factory, host: str, port: int, *, most_waiting: int = BACKLOG, answers_ended: bool = True
) -> ListeningPort:
    """Listens on host:port; port 0 takes a free one. If more than `most_waiting` connections wait to be opened, some of the
    address that has most of them are closed. `answers_ended`: a client that sends nothing more after its request may get an
    answer, as HTTP/1 allows it. Raises `OSError`, which names the address, when the port is taken."""
    acceptor = _Acceptor(factory, most_waiting=most_waiting, answers_ended=answers_ended)
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
