"""One client connection: bytes become whole requests, and answers become bytes, over the parser of httptools (llhttp).

The parser is strict about framing: a request with two lengths, with a length and chunks, or with control characters in its
head is an error, never a guess. This module bounds what a client can do: the sizes and the number of headers, the body, the
requests that wait on one connection, the time for a head, for a body, and for the client to take its answer. Each error
is an OpenAI error object. `http_listener` brings the paths and the handlers.

One task serves a connection, one request after the other. The loss of the connection cancels it, and with it the call.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import httptools

from tidegate_gateway.edge import (
    arriving_body,
    client_addresses,
    client_transport,
    framing_errors,
    http_messages,
    incoming_bytes,
    tls_handshake,
)
from tidegate_gateway.openai import error_table, http_headers
from tidegate_gateway.openai.error_table import BadRequest

if TYPE_CHECKING:
    from tidegate_gateway.edge import http_listener

logger = logging.getLogger("tidegate.gateway")

TAKEN_BYTES = 64 * 1024
"""The bytes of an answer that a client must take within `limits.write_s`, or all that are left."""
LINGER_S = 2.0
"""How long the rest of a rejected request is still read, so that the client sees the error."""
HANG_UP_LOOK_S = 2.0
"""Between two looks whether a client is still there, while nothing is read from it."""
_CHUNKED = "Transfer-Encoding: chunked\r\n"


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, listener: "http_listener.Server") -> None:
        self._listener = listener
        self._limits = listener.limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._waiting: collections.deque[http_messages.Request | error_table.GatewayError] = collections.deque()
        self._drained: asyncio.Future[None] | None = None
        self._full = self._ignoring = False  # the client does not take what was written; nothing more is parsed
        self._paused = False  # nothing more is read while a request waits behind the present one
        self._incoming = incoming_bytes.IncomingBytes(listener.turns, self._parse, self._reject)
        self._held = b""  # the head of a stream that has not left yet
        self._frame_bytes = 0  # since the last byte of a body, or the last request
        self._rejected = 0  # invalid requests since the last one of another kind
        self._header_bytes = 0
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._in_body = False
        self._bodies = listener.bodies.hold()
        self._body = arriving_body.ArrivingBody(self._bodies)
        self._request: http_messages.Request | None = None
        self._resumed: http_messages.Request | None = None
        self._limit_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._present: http_messages.Request | None = None
        self._begun = False  # the head of the present answer is written
        self.unused = True
        """It has brought no request yet."""
        self.address = ""
        """The address of the client, without its port."""

    # What handlers and the listener use.

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Begins a stream. The head leaves with its first block."""
        request = self._served
        self._begun = True
        if not request.chunks:
            request.keeps = False
        self._held = self._head(request, status, headers, _CHUNKED if request.chunks else "")
        if request.method == "HEAD":
            await self._write(self._held)
            self._held = b""

    async def write(self, block: bytes, *, last: bool = False) -> None:
        """Writes a block of the stream. Raises `ConnectionResetError` if the client does not take it."""
        request, held = self._served, self._held
        self._held = b""
        if request.method == "HEAD":
            return
        if not request.chunks:
            await self._write(held + block)
            return
        await self._write(*http_messages.chunk(held, block, last=last))

    def release_body(self) -> None:
        """The handler has let go of the body of the present request, long before its answer ends."""
        self._bodies.add(-self._served.body_bytes)
        self._served.body_bytes = 0

    @property
    def idle(self) -> bool:
        """No request is being read or answered."""
        return self._idle_before and self._request is None and not self._frame_bytes and not self._incoming.waits

    def close(self) -> None:
        """Closes the connection once what is written has left."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cuts the connection."""
        if self._transport is not None:
            self._transport.abort()

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = plain = cast("asyncio.Transport", transport)
        self.address = client_addresses.address_of(plain)
        if not self._listener.opened(self):
            self._ignoring = True
            plain.abort()
            return
        if self._listener.encryption is None:
            self._begin_reading(plain)
        else:
            tls_handshake.TlsHandshake(
                plain,
                self,
                self._begin_reading,
                self._listener.encryption,
                self._listener.handshakes,
                within_s=self._limits.idle_s,
            )

    def _begin_reading(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._incoming.begin(transport, self.address)
        transport.set_write_buffer_limits(1, 0)  # an answer has left when the kernel has all of it
        self._limit(self._limits.idle_s)
        self.task = self._loop.create_task(self._serve())
        self.task.add_done_callback(self._forget_task)

    def data_received(self, data: bytes) -> None:
        if self._ignoring:
            self._incoming.discarded(len(data))
        else:
            self._incoming.arrived(data)

    def _parse(self, data: bytes) -> bool:
        """Parses the next bytes; whether further ones may be parsed."""
        if self._ignoring:
            return False
        self._frame_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if self._frame_bytes > framing_errors.HEAD_BYTES:
                raise framing_errors.too_many_headers()
        except httptools.HttpParserUpgrade as offer:
            self._ignore_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            known = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._reject(known if isinstance(known, error_table.GatewayError) else framing_errors.parsers_error(error))
        except error_table.GatewayError as error:
            self._reject(error)
        return not self._ignoring

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Goes on with HTTP/1.1 after a request that offers another protocol, as Java's client does in its first request.
        The parser stops at the end of the head of such a request. A new parser reads its body."""
        self._parser = httptools.HttpRequestParser(self)
        self._resumed = self._request
        if self._resumed is not None:
            framing = ("content-length", "transfer-encoding")
            lines = "".join(f"{name}: {value}\r\n" for name, value in self._resumed.headers if name in framing)
            rest = b"POST / HTTP/1.1\r\n%s\r\n%s" % (lines.encode("utf-8", "surrogateescape"), rest)
        if rest:
            self._parse(rest)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self not in self._listener.connections:
            return
        self._ignoring = True
        self._incoming.end()
        self._bodies.release()
        del self._parser  # it and this object know each other, and would wait long for the garbage collector
        self._body.drop()
        self._waiting.clear()
        if self._present is not None:
            self._present.body = b""
        self._listener.closed(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport = None
        if self.task is not None:
            self._listener.endings.end(self.task.cancel)  # which may be later: until then the task finds no transport

    # The parser.

    def on_message_begin(self) -> None:
        if self._resumed is not None:
            return
        self._url, self._headers, self._header_bytes = b"", [], 0
        if len(self._waiting) >= framing_errors.PIPELINED + (self._present is None):
            raise framing_errors.too_many_at_once()

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > framing_errors.PATH_BYTES:
            raise framing_errors.path_too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer, or a head that was read before
        size = len(name) + len(value)
        self._header_bytes += size
        if (
            len(self._headers) >= framing_errors.HEADERS
            or size > framing_errors.HEADER_BYTES
            or self._header_bytes > framing_errors.HEAD_BYTES
        ):
            raise framing_errors.too_many_headers()
        self._headers.append((http_messages.lower_name(name), value.decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if self._resumed is not None:
            self._request, self._resumed = self._resumed, None
            return
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise BadRequest(framing_errors.INVALID + framing_errors.FIRST_LINE)
        target = self._url.decode("latin-1")
        if not target.startswith("/"):
            target = framing_errors.origin_form(self._url)
        request = http_messages.Request(
            method=parser.get_method().decode("latin-1"),
            target=target,
            headers=self._headers,
            keeps=version == "1.1" and parser.should_keep_alive(),
            chunks=version == "1.1",
        )
        self._request = request
        self._in_body = True
        if self._idle_before:
            self._listener.waits(self)
        framing_errors.check_headers(request)
        self._listener.find(request)
        self._bodies.count_for(http_headers.named_tenant(request.headers))
        route = request.route[0] if request.route is not None else None
        most_bytes = (route.body_bytes if route is not None else None) or self._limits.body_bytes
        if int(request.header("content-length") or 0) > most_bytes:
            raise framing_errors.body_too_large(most_bytes)
        has_chunks = bool(request.header("transfer-encoding"))
        small_pieces = framing_errors.SMALL_CHUNKS if has_chunks else framing_errors.BODY_PIECES
        self._body.begin(most_bytes=most_bytes, small_pieces=small_pieces, is_call=route is not None and route.is_call)
        if not self._paused:
            self._limit(self._limits.body_s)
        if request.header("expect").lower() == "100-continue" and self._transport is not None and self._idle_before:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.add(data)
        self._frame_bytes = 0

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or (self._parser.should_upgrade() and request.has_body):
            return  # `_ignore_upgrade` goes on
        self._request = None
        self._in_body = False
        self._frame_bytes = 0
        self._incoming.request_ended()
        self._listener.unoccupied.pop(self, None)
        request.body, request.is_counted = self._body.taken()
        request.body_bytes = len(request.body)
        self.unused = False
        if not self._idle_before and not self._paused and self._transport is not None:
            self._paused = True
            self._incoming.pause()
            self._limit(HANG_UP_LOOK_S)
        self._waiting.append(request)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    @property
    def _idle_before(self) -> bool:
        """No answer is due before that of the request that is being read."""
        return self._present is None and not self._waiting

    # The task.

    async def _serve(self) -> None:
        try:
            await self._requests()
        except Exception:
            logger.exception("a client connection failed")
            self.abort()

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        """A cancelled task knows its frames, and they know this object: a cycle would keep all that they have."""
        self.task = None

    async def _requests(self) -> None:
        waiting, follows = self._waiting, False
        while self._transport is not None:
            while not waiting:
                if not self._in_body:
                    self._limit(self._limits.idle_s)
                self._listener.waits(self)
                self._arrived = self._loop.create_future()
                await self._arrived
            if isinstance(waiting[0], http_messages.Request):
                await self._listener.turn_of(waiting[0], follows=follows)
                if not waiting:
                    return  # the connection was lost meanwhile
            item = waiting.popleft()
            if self._paused and not waiting:
                self._paused = False
                self._incoming.resume()
                if self._in_body:
                    self._limit(self._limits.body_s)
            if isinstance(item, error_table.GatewayError):
                await self._refuse(item)
                return
            self._present, self._begun = item, False
            try:
                response = await self._answered(item)
                if response is not None:
                    await self._write_whole(item, response)
            except ConnectionError:
                self.abort()
                return
            self._present, item.body = None, b""
            if item.body_bytes:
                self._bodies.add(-item.body_bytes)
            if not item.keeps:
                if self._rejected >= framing_errors.REJECTED_IN_A_ROW:
                    await self._linger()
                self.close()
                return
            follows = bool(waiting or self._rejected)

    async def _answered(self, request: http_messages.Request) -> http_messages.Response | None:
        """The answer of the listener. Raises `ConnectionError` if it fails after its beginning."""
        rejected, self._rejected = self._rejected, 0
        try:
            return await self._listener.answer(request, self)
        except error_table.GatewayError as error:
            response = http_messages.error_response(error)
            if error.row.status == 400:
                self._rejected = rejected + 1
                request.keeps &= self._rejected < framing_errors.REJECTED_IN_A_ROW
        except ConnectionError:
            raise
        except Exception:
            logger.exception("request %s failed", request.path[:80])
            response = http_messages.error_response(error_table.mistake_of_the_gateway())
            request.keeps = False
        if self._begun:
            raise ConnectionError("the answer has begun; nothing can be added to it")
        return response

    async def _write_whole(self, request: http_messages.Request, response: http_messages.Response) -> None:
        headers = {"Content-Type": response.content_type, **response.headers}
        head = self._head(request, response.status, headers, f"Content-Length: {len(response.body)}\r\n")
        await self._write(head if request.method == "HEAD" else head + response.body)

    def _head(self, request: http_messages.Request, status: int, headers: Mapping[str, str], framing: str) -> bytes:
        """The head of an answer, with a request id. While the listener leaves, the connection closes after the answer."""
        if self._listener.leaving:
            request.keeps = False
        named = headers if "x-request-id" in headers else {**headers, "x-request-id": http_messages.request_id(request)}
        return http_messages.head(status, named, framing, http_messages.date(), keeps=request.keeps)

    async def _refuse(self, error: error_table.GatewayError) -> None:
        """Answers a request that cannot be read, and reads on for a while, so that the client sees the answer."""
        request = self._request or http_messages.Request(method="GET", target="/", headers=self._headers)
        request.keeps = False
        self._present = request
        with contextlib.suppress(OSError):
            await self._write_whole(request, http_messages.error_response(error))
            await self._linger()
        self.abort()

    async def _linger(self) -> None:
        """Reads on for a while. A connection that is closed with unread bytes is reset, and loses its last answer."""
        self._ignoring = True
        self._waiting.clear()
        self._incoming.resume()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        self._listener.lingers(self)
        await asyncio.sleep(LINGER_S)

    # Writing.

    @property
    def _served(self) -> http_messages.Request:
        if self._present is None:
            raise AssertionError("no request is being answered")
        return self._present

    async def _write(self, *parts: bytes) -> None:
        """Writes, and waits until the kernel has it all. Raises `ConnectionResetError` when the client does not read."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the connection is lost")
        transport.writelines(parts)
        while self._full:
            left = transport.get_write_buffer_size()
            self._listener.unread.enter(transport)
            self._drained = self._loop.create_future()
            try:
                async with asyncio.timeout(self._limits.write_s):
                    await self._drained
            except TimeoutError as error:
                if left - transport.get_write_buffer_size() < TAKEN_BYTES:
                    raise ConnectionResetError("the client does not read its answer") from error
            finally:
                self._drained = None
                self._listener.unread.leave(transport)
        if transport.is_closing():
            raise ConnectionResetError("the connection is lost")

    # Limits.

    def _limit(self, seconds: float) -> None:
        """Sets the limit of the present wait for the client. A timer that fires earlier stays as it is."""
        self._limit_at_s = at_s = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._ignoring:
            pass
        elif self._incoming.waits:  # for the gateway, not for the client
            looks_again_at_s = max(self._limit_at_s, self._loop.time() + HANG_UP_LOOK_S)
            self._timer = self._loop.call_at(looks_again_at_s, self._on_timer)
        elif self._loop.time() < self._limit_at_s - 0.001:
            self._timer = self._loop.call_at(self._limit_at_s, self._on_timer)
        elif self._in_body and not self._paused:
            self._reject(framing_errors.slow_body(self._limits.body_s))
        elif self._idle_before:
            self.close()
        elif self._paused:
            if self._transport is None or client_transport.hung_up(self._transport):
                self.abort()
            else:
                self._limit(HANG_UP_LOOK_S)

    def _reject(self, error: error_table.GatewayError) -> None:
        """Nothing more is parsed; the error is answered after the requests before it."""
        error.__traceback__ = error.__context__ = error.__cause__ = None  # its frames would keep the body
        self._ignoring = True
        self.unused = False
        self._body.drop()
        self._waiting.append(error)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
