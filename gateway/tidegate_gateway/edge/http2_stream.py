"""One gRPC call over a connection of HTTP/2: what is sent, as far as the windows of the peer allow, and its end."""

import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from tidegate_gateway.edge import http2_frames as h2
from tidegate_gateway.edge import http2_heads, tenant_budget

if TYPE_CHECKING:
    from tidegate_gateway.edge import http2_connection

OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, ABORTED, UNIMPLEMENTED, INTERNAL = 0, 3, 5, 8, 10, 12, 13
"""Codes of gRPC."""
MOST_TOLD_BYTES = 2000
"""Of the words of a status."""
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
_HEAD = (
    _STATUS_200
    + _literal(b"content-type", b"application/grpc")
    + _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
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
        "half_closed",
        "handler",
        "head",
        "id",
        "is_compressed",
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
        self.half_closed = False
        self.partial = bytearray()
        """The beginning of a message that has not arrived as a whole."""
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
        return bool(self._unsent) or self._connection.is_full

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
        if self._trailers is not None:
            return
        head = b"" if self._begun else h2.frame(h2.HEADERS, h2.END_HEADERS, self.id, _HEAD)
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
        if self._trailers is not None:
            return
        status = _WELL if code == OK else _literal(b"grpc-status", b"%d" % code)
        if message:
            status += _literal(b"grpc-message", urllib.parse.quote(message[:MOST_TOLD_BYTES], safe=_SAFE).encode())
        for name, value in further:
            status += _literal(name, value)
        self._trailers = status if self._begun else _HEAD + status
        if code != OK:
            self.drop()  # an error does not wait until the client has taken what came before it
        self.flush()

    def give_up(self) -> None:
        """The peer has not taken what was sent for too long. If it takes nothing at all, its connection is cut."""
        if self._connection.is_full:
            self._connection.abort()

    def drop(self) -> None:
        """Nothing more can be sent."""
        self._connection.hold(-len(self._unsent))
        self._unsent.clear()
        self.when_writable = None

    def flush(self) -> None:
        """Sends what the peer's windows allow."""
        while self._unsent:
            size = min(len(self._unsent), h2.MOST_FRAME_BYTES, self.window, self._connection.window)
            if size <= 0 or not self._connection.spend(self, size):
                return
            self._connection.write(h2.frame(h2.DATA, 0, self.id, bytes(self._unsent[:size])))
            del self._unsent[:size]
            self._connection.hold(-size)
        self.tell_writer()
        if self._trailers is not None:
            self._connection.write(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self.id, self._trailers))
            if not self.half_closed:
                self._connection.write(h2.frame(h2.RST_STREAM, 0, self.id, h2.NO_ERROR.to_bytes(4)))
            self._connection.forget(self)
