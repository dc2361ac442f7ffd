"""Calls of gRPC to one server that may be hostile, over one connection of HTTP/2.

grpcio answers each PING and SETTINGS frame of a server at once: one engine that sent nothing else took a whole core of
each process that asked it, and eight took 2 GB of memory within half a minute. A `Channel` reads frames at a bounded pace
instead, and the connection holds the server back (decision 61). The library `h2` does the framing.
"""

import asyncio
import collections
import contextlib
import socket
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import cast

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from tidegate_control import frame_pace

CONNECT_S = 10.0
"""Longest time until a server takes the connection."""
READ_BYTES = 4096
"""Bytes that are read at once: some hundred of the smallest frames, which take a few milliseconds."""
WINDOW_BYTES = 128 * 1024
"""Of an answer that a server may send before its first message is taken. A message may have half of it."""
MOST_UNREAD_BYTES = 64 * 1024
"""Of our frames that the server does not read. A server that leaves more loses the connection."""
HEAD_BYTES = 16 * 1024
"""Of an answer's headers or trailers."""
MOST_DETAILS = 1000
"""Characters of an error's details."""
MOST_REQUEST_BYTES = 60 * 1024
"""Of a call: the window that a server grants before it says more (RFC 9113, section 6.9.2)."""
KEEPALIVE_S = 30
"""Idle time after which TCP asks whether the server's machine is still there."""
KEEPALIVE_PERIOD_S, KEEPALIVES = 10, 3
"""How often TCP asks then, and the questions without an answer after which it ends the connection."""
UNACKNOWLEDGED_MS = 60_000
"""Longest time for which the server's machine may leave bytes unacknowledged."""
GOODBYE = "the server ends the connection"
CLOSED = "the caller has ended the connection"
PREFIX_BYTES = 5
"""Before each message: whether it is compressed, and its length."""
CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
CODES_OF_HTTP: Mapping[bytes, grpc.StatusCode] = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}
"""What an answer without a status of gRPC means (gRPC over HTTP2, "HTTP to gRPC Status Code Mapping")."""


class CallFailed(Exception):
    """A server did not answer a call, or answered with an error; the message is `CODE: details`."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details[:MOST_DETAILS]}")
        self.is_unreachable = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        """Whether the server could not be reached, as opposed to having rejected the call."""
        self.is_unauthenticated = code is grpc.StatusCode.UNAUTHENTICATED
        """Whether the server did not accept the token of the call."""
        self.is_invalid = code is grpc.StatusCode.INVALID_ARGUMENT
        """Whether the server does not know what the call asks for."""


class Channel:
    """Calls to one address. The connection is made by the first call, and again by the first call after its end."""

    def __init__(self, address: str, *, metadata: Mapping[str, str], most_message_bytes: int) -> None:
        """`address` is host:port or unix:PATH. Each call carries `metadata`. An answer with a longer
        message fails."""
        if most_message_bytes > WINDOW_BYTES // 2:
            raise ValueError(f"most_message_bytes is {most_message_bytes}, more than half of {WINDOW_BYTES}")
        self._address = address
        self._metadata = [*metadata.items()]
        self._most_message_bytes = most_message_bytes
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def call(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """The one message of the answer; raises `CallFailed`. `method` is /SERVICE/METHOD."""
        try:
            async with asyncio.timeout(timeout_s), self._answer(method, request, timeout_s) as answer:
                message = await answer.message()
                if message is None or await answer.message() is not None:
                    raise CallFailed(grpc.StatusCode.INTERNAL, "the answer does not have one message")
                return message
        except TimeoutError:
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:.3g} s") from None

    async def stream(self, method: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """The messages of the answer until the server ends it. It sends at most `WINDOW_BYTES` beyond those that were
        taken, and other calls pass them. Raises `CallFailed`."""
        async with self._answer(method, request, None) as answer:
            while (message := await answer.message()) is not None:
                yield message

    async def close(self) -> None:
        """Ends the connection, and all calls on it, for good."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.end(CLOSED)

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, request: bytes, timeout_s: float | None) -> AsyncIterator["_Answer"]:
        connection = await self._connected()
        answer = connection.begin(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", method),
                (":authority", "localhost" if self._address.startswith("unix:") else self._address),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "tidegate"),
                *([] if timeout_s is None else [("grpc-timeout", f"{max(int(timeout_s * 1000), 1)}m")]),
                *self._metadata,
            ],
            bytes(1) + len(request).to_bytes(4) + request,
            self._most_message_bytes,
        )
        try:
            yield answer
        finally:
            connection.leave(answer)

    async def _connected(self) -> "_Connection":
        async with self._connecting:
            if not self._is_closed and (self._connection is None or self._connection.ended is not None):
                self._connection = await self._connect()
            if self._connection is None:
                raise CallFailed(grpc.StatusCode.CANCELLED, CLOSED)
            if self._is_closed:
                self._connection.end(CLOSED)
            return self._connection

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._address.startswith("unix:"):
                    path = self._address.removeprefix("unix:")
                    _, connection = await loop.create_unix_connection(_Connection, path)
                else:
                    place = urllib.parse.urlsplit(f"//{self._address}")
                    host, port = place.hostname or "", place.port or 0
                    _, connection = await loop.create_connection(_Connection, host, port)
        except TimeoutError:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"no connection within {CONNECT_S:.3g} s") from None
        except (OSError, ValueError) as error:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"no connection: {error}") from None
        return connection


class _Answer:
    """The answer of one call."""

    def __init__(self, connection: "_Connection", stream_id: int, most_message_bytes: int) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self._most_message_bytes = most_message_bytes
        self._unread = bytearray()
        self._is_over = False
        self._failure: CallFailed | None = None
        self._status: grpc.StatusCode | None = None
        self._details = ""
        self._changed = asyncio.Event()

    async def message(self) -> bytes | None:
        """The next message; None after the last one of an answer without an error. Raises `CallFailed`."""
        while (message := self._next()) is None:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        return message

    def _next(self) -> bytes | None:
        if len(self._unread) < PREFIX_BYTES:
            return None
        size = int.from_bytes(self._unread[1:PREFIX_BYTES])
        if self._unread[0]:
            raise CallFailed(grpc.StatusCode.INTERNAL, "the answer is compressed")
        if size > self._most_message_bytes:
            raise CallFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message has {size} bytes")
        if len(self._unread) < PREFIX_BYTES + size:
            return None
        message = bytes(self._unread[PREFIX_BYTES : PREFIX_BYTES + size])
        del self._unread[: PREFIX_BYTES + size]
        self._connection.taken(self.stream_id, PREFIX_BYTES + size)
        return message

    def on_head(self, fields: Mapping[bytes, bytes]) -> None:
        """Headers or trailers."""
        if (http := fields.get(b":status", b"200")) != b"200":
            self._status = CODES_OF_HTTP.get(http, grpc.StatusCode.UNKNOWN)
            self._details = f"HTTP status {http.decode(errors='replace')}"
        if (code := fields.get(b"grpc-status")) is not None:
            self._status = CODES.get(int(code), grpc.StatusCode.UNKNOWN) if code.isdigit() else grpc.StatusCode.UNKNOWN
            self._details = urllib.parse.unquote_to_bytes(fields.get(b"grpc-message", b"")).decode(errors="replace")

    def on_data(self, data: bytes) -> None:
        self._unread += data
        self._changed.set()

    def on_end(self) -> None:
        """The server has ended the answer."""
        if self._status is None:
            self.fail(CallFailed(grpc.StatusCode.UNKNOWN, "the answer ended without a status"))
        elif self._status is not grpc.StatusCode.OK:
            self.fail(CallFailed(self._status, self._details))
        else:
            self._is_over = True
            self._changed.set()

    def fail(self, failure: CallFailed) -> None:
        self._failure = self._failure or failure
        self._changed.set()


class _Connection(asyncio.BufferedProtocol):
    """One connection, whose frames are read at the pace of `frame_pace`."""

    def __init__(self) -> None:
        self.ended: str | None = None
        """Why no more calls can be made."""
        self._http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self._http2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES,
            },
        )
        self._http2.decoder.max_header_list_size = HEAD_BYTES
        self._buffer = bytearray(READ_BYTES)
        self._pace = frame_pace.FramePace(asyncio.get_running_loop().time)
        self._answers: dict[int, _Answer] = {}
        self._owed: collections.Counter[int] = collections.Counter()
        """Bytes that have been taken and whose room is not announced yet: by stream, and of the connection by 0."""
        self._transport: asyncio.Transport | None = None
        self._resume: asyncio.TimerHandle | None = None

    def begin(self, head: list[tuple[str, str]], body: bytes, most_message_bytes: int) -> _Answer:
        """Sends a call; raises `CallFailed`."""
        if self.ended is not None:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, self.ended)
        if len(body) > MOST_REQUEST_BYTES:
            raise CallFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a request has {len(body)} bytes")
        stream_id = self._http2.get_next_available_stream_id()
        self._answers[stream_id] = answer = _Answer(self, stream_id, most_message_bytes)
        try:
            self._http2.send_headers(stream_id, head)
            for at in range(0, len(body), frame_pace.LONGEST_BYTES):
                end = at + frame_pace.LONGEST_BYTES
                self._http2.send_data(stream_id, body[at:end], end_stream=end >= len(body))
        except h2.exceptions.H2Error as error:  # the server admits no call, or fewer bytes
            self.leave(answer)
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"the server takes no call: {error}") from None
        self._flush()
        return answer

    def leave(self, answer: _Answer) -> None:
        """Nothing more of the answer is wanted."""
        if self._forget(answer.stream_id) is not None and self.ended is None:
            with contextlib.suppress(h2.exceptions.H2Error):  # the server has ended it
                self._http2.reset_stream(answer.stream_id, h2.errors.ErrorCodes.CANCEL)
            self._flush()

    def taken(self, stream_id: int, size: int) -> None:
        """So many bytes of an answer have been read: the server may send as many more, which it learns in steps. It may
        have ended the answer before they were read; it needs no room then, and `h2` has forgotten the stream."""
        if stream_id in self._answers:
            self._grant(stream_id, size)

    def _grant(self, stream_id: int, size: int) -> None:
        """Room for bytes of a stream, or of the connection (0)."""
        self._owed[stream_id] += size
        if self._owed[stream_id] >= READ_BYTES and self.ended is None:
            with contextlib.suppress(h2.exceptions.H2Error):  # the bytes that were read further on end the connection
                self._http2.increment_flow_control_window(self._owed.pop(stream_id), stream_id or None)
            self._flush()

    def _forget(self, stream_id: int) -> _Answer | None:
        """The answer, if it has not ended. It has now."""
        self._owed.pop(stream_id, None)
        return self._answers.pop(stream_id, None)

    def end(self, why: str) -> None:
        """Ends the connection and all its calls."""
        if self.ended is not None:
            return
        self.ended = why
        if self._resume is not None:
            self._resume.cancel()
        if self._transport is not None:
            self._transport.abort()
        for answer in self._answers.values():
            answer.fail(CallFailed(grpc.StatusCode.UNAVAILABLE, why))
        self._answers.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # that of uvloop has no common class with asyncio's
        _watch_for_silence(transport.get_extra_info("socket"))
        self._http2.initiate_connection()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"the connection broke: {exc}" if exc else "the server has ended the connection")

    def eof_received(self) -> None:
        self.end(GOODBYE)  # also where the server leaves frames of ours unread

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(memoryview(self._buffer)[:nbytes])
        try:
            rest_s = self._pace.read(data)
            for event in self._http2.receive_data(data):
                self._on_event(event)
        except Exception as error:  # noqa: BLE001  # whatever a server sends ends its own connection only
            # `h2` takes no frame after GOAWAY, though servers send some.
            self.end(GOODBYE if self._pace.has_goaway else f"the server breaks the protocol: {error!r}"[:MOST_DETAILS])
            return
        self._flush()
        if rest_s > 0.0 and self.ended is None and self._transport is not None:
            self._transport.pause_reading()
            self._resume = asyncio.get_running_loop().call_later(rest_s, self._read_on)

    def _read_on(self) -> None:
        if self.ended is None and self._transport is not None:
            self._transport.resume_reading()

    def _on_event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._grant(0, event.flow_controlled_length)
                if answer := self._answers.get(event.stream_id):
                    self.taken(event.stream_id, event.flow_controlled_length - len(event.data))  # padding
                    answer.on_data(event.data)
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                if answer := self._answers.get(event.stream_id):
                    answer.on_head(dict(event.headers))
            case h2.events.StreamEnded():
                if answer := self._forget(event.stream_id):
                    answer.on_end()
            case h2.events.StreamReset():
                if answer := self._forget(event.stream_id):
                    answer.fail(CallFailed(grpc.StatusCode.UNAVAILABLE, f"reset by the server: {event.error_code!r}"))
            case h2.events.ConnectionTerminated():
                self.end(GOODBYE)

    def _flush(self) -> None:
        if self._transport is None or self.ended is not None:
            return
        if data := self._http2.data_to_send():
            self._transport.write(data)
        if self._transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self.end("the server does not read")


def _watch_for_silence(connected: socket.socket) -> None:
    """Lets TCP end a connection whose other machine is gone; a stream may be silent for long."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PERIOD_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
