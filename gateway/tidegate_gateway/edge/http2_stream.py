"""One gRPC call over a connection of HTTP/2: its messages, what is sent, as far as the windows of the peer allow, and its
end."""

import logging
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from tidegate_gateway import tenant_budget
from tidegate_gateway.edge import http2_frames as h2
from tidegate_gateway.edge import http2_heads

if TYPE_CHECKING:
    from tidegate_gateway.edge import http2_connection

logger = logging.getLogger("tidegate.gateway")

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 0, 1, 2, 3, 4, 5
RESOURCE_EXHAUSTED, ABORTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 10, 12, 13, 14
"""Codes of gRPC."""
MOST_TOLD_BYTES = 2000
"""Of the words of a status, as they are sent; clients take 8 KiB of trailers."""
MOST_FRAMES = 1 << 30
"""All that the windows allow."""
_SAFE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Characters of a status that need no escape."""


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that is not compressed and that the peer does not memorize."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: bytes) -> bytes:
    """Text with its length (RFC 7541, 5.1 and 5.2)."""
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    head, rest = b"\x7f", size - 127
    while rest >= 128:
        head, rest = head + bytes([rest % 128 + 128]), rest // 128
    return head + bytes([rest]) + text


_STATUS_200 = b"\x88"
_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc")
_INFLATES = _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
NOT_GRPC = b"\x08\x03415"
"""The head of an answer to a request that is no call of gRPC: its `:status` is 415."""
_WELL = _literal(b"grpc-status", b"0")


class Handler(Protocol):
    """Answers one stream. Its methods return at once."""

    def on_message(self, message: bytes) -> None:
        """A whole message came."""

    def on_half_close(self) -> None:
        """The peer sends no further message."""

    def on_reset(self) -> None:
        """The peer has ended the stream, or its connection is lost; nothing can be sent any more."""


class Stream:
    """One gRPC call of the peer."""

    __slots__ = (
        "_begun",
        "_connection",
        "_trailers",
        "_unsent",
        "counted",
        "gone",
        "half_closed",
        "handler",
        "head",
        "id",
        "is_compressed",
        "is_unknown",
        "opened_at_s",
        "partial",
        "small",
        "unread",
        "when_writable",
        "window",
    )

    def __init__(
        self,
        connection: "http2_connection.Connection",
        number: int,
        window: int,
        head: http2_heads.Head,
        counted: tenant_budget.Held,
    ) -> None:
        self.id = number
        self.head = head
        self.opened_at_s = time.monotonic()
        self.is_compressed = False
        """The message that came last is compressed, as the head says."""
        self.when_writable: Callable[[], None] | None = None
        """Called once when the peer has taken what was sent, or may take it soon."""
        self.handler: Handler | None = None
        self.window = window
        """Bytes that the peer takes on this stream."""
        self.gone = False
        """It has ended, or the peer has reset it: nothing of it is sent or received any more."""
        self.half_closed = False
        self.partial = bytearray()
        """The beginning of a message that has not arrived as a whole."""
        self.is_unknown = False
        """Its caller has no valid key."""
        self.small = 0
        """Small frames of data that came."""
        self.counted = counted
        """The bytes of `partial` in the sum of its server."""
        self.unread = 0
        """Bytes that arrived and are not acknowledged."""
        self._connection = connection
        self._begun = False
        self._unsent = bytearray()
        self._trailers: bytes | None = None

    @property
    def answered(self) -> bool:
        """A message or the end has been sent."""
        return self._begun or self._trailers is not None

    @property
    def ended(self) -> bool:
        """Its status is known, and the peer has it or will have it."""
        return self._trailers is not None

    @property
    def is_held(self) -> bool:
        """What was sent waits for the peer."""
        return not self.gone and (bool(self._unsent) or self._connection.is_full)

    @property
    def waits(self) -> bool:
        """Bytes, or a writer, wait for the peer."""
        return bool(self._unsent) or self.when_writable is not None

    # What the peer sends.

    def receive(self, payload: bytes, *, last: bool) -> None:
        """Gives the handler the messages that are whole with these data, and tells it whether they were the last."""
        handler, self.half_closed = self.handler, last
        if handler is None or self.ended:
            return
        try:
            self._read(handler, payload)
            if last and not self.ended:
                handler.on_half_close()
        except Exception:
            logger.exception("a handler failed")
            self._break(handler, INTERNAL, "the handler failed; the log of the server says why")
        if not self.gone and len(self.partial) != self.counted.units:
            self.counted.add(len(self.partial) - self.counted.units)
            if self.partial and not self.counted.fits:
                self._break(handler, RESOURCE_EXHAUSTED, "too much is arriving; send the call again later")

    def _read(self, handler: Handler, payload: bytes) -> None:
        server, partial = self._connection.server, self.partial
        size, most = len(payload) - 5, server.bounds.message_bytes
        if not partial and 0 <= size <= most and not payload[0] and int.from_bytes(payload[1:5]) == size:
            self.is_compressed = False
            handler.on_message(payload[5:])
            return
        partial += payload
        while len(partial) >= 5 and not self.ended:
            size, is_compressed = int.from_bytes(partial[1:5]), bool(partial[0])
            if is_compressed and not server.takes_compressed:
                self._break(handler, UNIMPLEMENTED, "compressed messages are not supported")
            elif size > most:
                self._break(handler, RESOURCE_EXHAUSTED, f"a message has at most {most} bytes")
            elif len(partial) < 5 + size:
                return
            else:
                self.is_compressed = is_compressed
                message = bytes(memoryview(partial)[5 : 5 + size])
                del partial[: 5 + size]
                self.counted.add(len(partial) - self.counted.units)  # the handler counts the message
                handler.on_message(message)

    def _break(self, handler: Handler, code: int, why: str) -> None:
        self.partial.clear()
        self.counted.release()
        self.finish(code, why)
        handler.on_reset()

    # What is sent.

    def wait(self, when_writable: Callable[[], None]) -> None:
        """Calls it once when the peer takes more."""
        self.when_writable = when_writable
        self._connection.wait(self)

    def tell_writer(self) -> None:
        """The peer takes more, if nothing of this stream waits."""
        if self.when_writable is not None and not self.is_held:
            tell, self.when_writable = self.when_writable, None
            tell()

    def send(self, message: bytes) -> None:
        """Sends one message. A stream that has ended ignores it."""
        if self.ended or self.gone:
            return
        head = b"" if self._begun else h2.frame(h2.HEADERS, h2.END_HEADERS, self.id, self._head)
        self._begun = True
        size = len(message) + 5
        data = b"\x00" + len(message).to_bytes(4) + message
        if not self._unsent and size <= h2.MOST_FRAME_BYTES and self._connection.spend(self, size):
            self._connection.write(head + h2.frame(h2.DATA, 0, self.id, data))
            return
        if head:
            self._connection.write(head)
        self._unsent += data
        self._connection.hold(size)
        self._connection.wait(self)
        self.flush()

    def finish(self, code: int = OK, message: str = "", further: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Ends the stream with a status and further trailers, once all messages are sent."""
        if self.ended or self.gone:
            return
        status = _WELL if code == OK else _literal(b"grpc-status", b"%d" % code)
        if message:
            status += _literal(b"grpc-message", _told(message))
        for name, value in further:
            status += _literal(name, value)
        self._trailers = status if self._begun else self._head + status
        if code != OK:
            self.drop()  # an error does not wait until the client has taken what came before it
        self.flush()

    @property
    def _head(self) -> bytes:
        return _HEAD + _INFLATES if self._connection.server.takes_compressed else _HEAD

    def give_up(self, waited_s: float) -> None:
        """The peer has not taken what was sent for so long. If it has taken nothing at all, its connection is cut."""
        if self._connection.is_full_since(waited_s):
            self._connection.abort()

    def drop(self) -> None:
        """Nothing more can be sent."""
        self._connection.hold(-len(self._unsent))
        self._unsent.clear()
        self.when_writable = None

    def flush(self, frames: int = MOST_FRAMES) -> bool:
        """Sends what the peer's windows allow, at most so many frames; whether more could be sent."""
        if self.gone:
            return False
        while self._unsent:
            size = min(len(self._unsent), h2.MOST_FRAME_BYTES, self.window, self._connection.window)
            if size <= 0 or not self._connection.spend(self, size):
                return False
            self._connection.write(h2.frame(h2.DATA, 0, self.id, bytes(self._unsent[:size])))
            del self._unsent[:size]
            self._connection.hold(-size)
            frames -= 1
            if not frames and self._unsent:
                return True
        self.tell_writer()
        if self._trailers is not None and not self.gone:
            self._connection.write(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self.id, self._trailers))
            if not self.half_closed:
                self._connection.write(h2.frame(h2.RST_STREAM, 0, self.id, h2.NO_ERROR.to_bytes(4)))
            self._connection.forget(self)
        return False


def _told(message: str) -> bytes:
    """The words of a status as gRPC escapes them, as far as the bound allows."""
    escaped = urllib.parse.quote(message[:MOST_TOLD_BYTES], safe=_SAFE).encode()[:MOST_TOLD_BYTES]
    cut = escaped.rfind(b"%", -2)
    return escaped if cut < 0 else escaped[:cut]
