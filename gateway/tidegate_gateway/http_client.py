"""HTTP/1.1 connections to engines, and to servers that have keys and rows, over the parser of httptools (llhttp).

One connection carries one request at a time. A pool keeps the idle connections of each server. The class knows nothing of
calls: it writes the bytes of a request, and gives the status, the content type and the body of the answer as the bytes
arrive. A server is not trusted: the head of its answer and the bytes that nobody has read yet are bounded, and each
violation of the protocol is `ConnectionLost`. Redirects are not followed. The caller bounds the time of each wait.
"""

import asyncio
import collections
import contextlib
import errno
import functools
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import cast

import httptools

from tidegate_gateway import reading_turns

KEEPALIVE_S = 3.0
"""Idle connections are closed before vLLM's server does (5 s), so that no call is written to a closing one."""
SWEEP_S = 1.0
"""Between two looks for connections that have been idle too long."""
HEAD_BYTES = 64 * 1024
"""The longest head of an answer, and the most bytes between two parts of its body."""
TURN_BYTES = 8 * 1024
"""A connection that brings more at once reads on in turn with the others that do, so that engines which send much, or much
that is dear to read, hold up nothing else."""
UNREAD_BYTES = 8 * 1024
"""So many bytes of an answer may wait for their reader while the connection reads on."""
READ_BYTES = 16 * 1024
"""What is read of a connection at once, and what the kernel keeps of it."""
UNREACHABLE = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH))
"""Errors that show that nobody listens at an address."""
SENT_AS_IS = "/%?&=+,;:@!$'()*~[]"
"""Of a path and a query: what RFC 3986 reserves, and the mark of what is encoded already."""


class ConnectionLost(OSError):
    """The connection cannot be made, has broken, or does not carry HTTP/1.1."""


class NotReachable(ConnectionLost):
    """The port refuses connections, or no address has it."""


class Connection(asyncio.BufferedProtocol):
    """One connection to a server. `send`, then `read` until it gives b"", then `release`; or `close` at any time."""

    __slots__ = (
        "_arrived",
        "_ended",
        "_frame_bytes",
        "_framed",
        "_in_line",
        "_keeps",
        "_kernel_bytes",
        "_lost",
        "_on_idle",
        "_parser",
        "_paused",
        "_transport",
        "_turns",
        "_unread",
        "_unread_bytes",
        "_waiter",
        "busy",
        "content_type",
        "idle_since_s",
        "status",
    )

    def __init__(
        self,
        on_idle: Callable[["Connection"], None],
        turns: reading_turns.ReadingTurns,
        arrived: memoryview,
        kernel_bytes: int,
    ) -> None:
        """`on_idle` takes the connection back when it can carry another request. All connections of an event loop share
        `arrived`, what the kernel has just given: the parser copies the parts of a body out of it."""
        self._turns = turns
        self._arrived = arrived
        self._kernel_bytes = kernel_bytes
        self._in_line = False
        self.busy = False
        self.idle_since_s = 0.0
        self.status = 0
        self.content_type = ""
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._lost: Exception | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._paused = False
        self._ended = False
        self._framed = False
        self._keeps = False
        self._frame_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes) -> None:
        """Writes a request and waits for the head of its answer. Raises `ConnectionLost`."""
        self.busy = True
        self.status = self._frame_bytes = 0
        self.content_type = ""
        self._ended = self._framed = self._keeps = False
        if self._transport is None or self._lost is not None:
            raise ConnectionLost("the connection is closed")
        self._transport.write(request)
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """The next bytes of the body; b"" at its end. Raises `ConnectionLost`."""
        while not self._unread:
            if self._ended:
                return b""
            await self._more()
        unread = self._unread
        data = unread[0] if len(unread) == 1 else b"".join(unread)
        unread.clear()
        self._unread_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            if not self._in_line:
                self._transport.resume_reading()
        return data

    @property
    def ended(self) -> bool:
        """The whole body has been read."""
        return self._ended and not self._unread

    @property
    def usable(self) -> bool:
        """The connection is open and has no request."""
        return self._lost is None and not self.busy and self._transport is not None and not self._transport.is_closing()

    def release(self) -> None:
        """Gives the connection back; closes it if its answer has not been read to the end, or the engine wants that."""
        if self.ended and self._keeps and self._lost is None:
            self.busy = False
            self._on_idle(self)
        else:
            self.close()

    def close(self) -> None:
        """Closes the connection; the engine sees that its client has gone."""
        self._lose(ConnectionLost("the gateway closed the connection"))

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Otherwise one read could bring 256 KiB of a stream whose client is slow.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._kernel_bytes)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._arrived

    def buffer_updated(self, nbytes: int) -> None:
        self._frame_bytes += nbytes
        try:
            if not self.busy or self._ended:
                raise ConnectionLost("it sent bytes that belong to no request")
            self._parser.feed_data(self._arrived[:nbytes])
            if self._frame_bytes > HEAD_BYTES:
                raise ConnectionLost(f"its answer has {HEAD_BYTES} bytes without a byte of its body")
        except httptools.HttpParserError:
            self._lose(ConnectionLost("its answer is not HTTP/1.1"))
        except httptools.HttpParserUpgrade:
            self._lose(ConnectionLost("its answer changes the protocol"))
        except ConnectionLost as error:
            # What was caught knows this frame: a cycle would keep the connection.
            self._lose(ConnectionLost(str(error)))
        if self._waiter is not None:
            self._wake()
        if nbytes > TURN_BYTES and not self._in_line and self._transport is not None and self._lost is None:
            self._in_line = True
            self._transport.pause_reading()
            self._turns.join(self._read_on)

    def _read_on(self) -> None:
        self._in_line = False
        if not self._paused and self._transport is not None:
            self._transport.resume_reading()

    def eof_received(self) -> None:
        if self.status and not self._framed and not self._ended:
            self._ended = True  # the body of an answer without a length ends with the connection
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._lost is None:
            self._lost = ConnectionLost("it closed the connection")
        if self._in_line:
            self._turns.leave(self._read_on)
        # Both know this object: a cycle would keep it.
        self._transport, self._parser = None, _NO_PARSER
        self._wake()

    # The parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        lower = name.lower()
        if lower == b"content-type":
            self.content_type = value.decode("latin-1")
        elif lower in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:  # an interim answer, such as 100 Continue
            self.content_type = ""
            self._framed = False

    def on_body(self, data: bytes) -> None:
        self._frame_bytes = 0
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > UNREAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status:
            self._ended = True
            self._keeps = self._parser.should_keep_alive()

    def on_message_begin(self) -> None:
        if self._ended:
            raise ConnectionLost("it sent two answers to one request")

    async def _more(self) -> None:
        """Waits for the next event of the connection. Raises `ConnectionLost`."""
        if self._lost is not None:
            raise ConnectionLost(str(self._lost))
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, error: ConnectionLost) -> None:
        if self._lost is None:
            self._lost = error
        if self._transport is not None:
            self._transport.abort()
        self._wake()


_NO_PARSER = httptools.HttpResponseParser(object())
"""Of a connection that is lost; nothing arrives on it."""


class Connections:
    """The connections to all servers."""

    def __init__(self, *, connect_s: float, kernel_bytes: int = READ_BYTES) -> None:
        """`kernel_bytes` of an answer wait in the kernel; more of them let a distant server send faster."""
        self._connect_s = connect_s
        self._kernel_bytes = kernel_bytes
        self._turns = reading_turns.ReadingTurns()
        self._arrived = memoryview(bytearray(READ_BYTES))
        self._idle: dict[str, collections.deque[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @contextlib.asynccontextmanager
    async def answer(self, url: str) -> AsyncIterator[Connection]:
        """A connection that has the head of the answer to GET `url`; what is not read of the answer is left. Raises
        `ConnectionLost`."""
        origin, start = request_start("GET", url)
        connection = await self.get(origin)
        try:
            await connection.send(start + b"\r\n")
            yield connection
        finally:
            connection.release()

    async def page(self, url: str, *, most_bytes: int) -> tuple[int, bytes]:
        """Status and body of the page at `url`; no body unless the status is 200. Raises `ConnectionLost`."""
        async with self.answer(url) as connection:
            page = bytearray()
            while connection.status == 200 and (data := await connection.read()):
                page += data
                if len(page) > most_bytes:
                    raise ConnectionLost(f"the page has more than {most_bytes} bytes")
            return connection.status, bytes(page)

    async def get(self, origin: str) -> Connection:
        """A connection to `origin` (`http://host:port`): the idle one that was used last, or a new one.

        Raises `ConnectionLost`."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since_s > asyncio.get_running_loop().time() - KEEPALIVE_S:
                return connection
            connection.close()
        return await self._connected(origin)

    def close(self) -> None:
        """Closes all idle connections, and those that become idle later."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    async def _connected(self, origin: str) -> Connection:
        where = urllib.parse.urlsplit(origin)
        secure = where.scheme == "https"
        tls = _tls() if secure else None
        loop = asyncio.get_running_loop()

        def idles(connection: Connection) -> None:
            if self._closed:
                connection.close()
                return
            connection.idle_since_s = loop.time()
            self._idle.setdefault(origin, collections.deque()).append(connection)
            if self._sweep is None:
                self._sweep = loop.call_later(SWEEP_S, self._close_idle)

        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(idles, self._turns, self._arrived, self._kernel_bytes),
                    where.hostname or "",
                    where.port or (443 if secure else 80),
                    ssl=tls,
                )
        except TimeoutError as error:
            raise ConnectionLost(f"it took no connection within {self._connect_s:.3g} s") from error
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno in UNREACHABLE:
                raise NotReachable("it takes no connections") from error
            raise ConnectionLost(f"no connection can be made ({error.strerror or error})") from error
        return connection

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - KEEPALIVE_S
        for origin, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since_s < oldest_s or not idle[0].usable):
                idle.popleft().close()
            if not idle:
                del self._idle[origin]
        self._sweep = loop.call_later(SWEEP_S, self._close_idle) if self._idle else None


@functools.cache
def _tls() -> ssl.SSLContext:
    """Trusts the authorities of this machine. Reading them takes tens of milliseconds, so it happens once."""
    return ssl.create_default_context()


@functools.lru_cache(maxsize=1024)
def request_start(method: str, url: str) -> tuple[str, bytes]:
    """The origin of a URL, and the first lines of each request to it. Its path and query go out as they are, without
    characters that a request cannot have."""
    where = urllib.parse.urlsplit(url)
    target = urllib.parse.quote(urllib.parse.urlunsplit(("", "", where.path or "/", where.query, "")), safe=SENT_AS_IS)
    start = f"{method} {target} HTTP/1.1\r\nHost: {where.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
    return f"{where.scheme}://{where.netloc}", start.encode("latin-1")
