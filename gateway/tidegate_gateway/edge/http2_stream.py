"""One gRPC call over a connection of HTTP/2: what is sent, as far as the windows of the peer allow, and its end."""

import urllib.parse
from typing import TYPE_CHECKING, Protocol

from tidegate_gateway.edge import http2_frames as h2

if TYPE_CHECKING:
    from tidegate_gateway.edge import http2_connection

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, ABORTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 10, 12, 13
"""Codes of gRPC."""


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that is not compressed and that the peer does not memorize; both parts are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_STATUS_200 = b"\x88"
_HEAD = _STATUS_200 + _literal(b"content-type", b"application/grpc")
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
        "id",
        "partial",
        "small",
        "unread",
        "window",
    )

    def __init__(self, connection: "http2_connection.Connection", number: int, window: int) -> None:
        self.id = number
        self.handler: Handler | None = None
        self.window = window
        """Bytes that the peer takes on this stream."""
        self.half_closed = False
        self.partial = bytearray()
        """The beginning of a message that has not arrived as a whole."""
        self.small = 0
        """Small frames of data that came."""
        self.counted = 0
        """Its bytes in the sum of its server."""
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
        self.flush()

    def finish(self, code: int = OK, message: str = "") -> None:
        """Ends the stream with a status, once all messages are sent."""
        if self._trailers is not None:
            return
        status = _WELL if code == OK else _literal(b"grpc-status", b"%d" % code)
        if message:
            status += _literal(b"grpc-message", urllib.parse.quote(message, safe=" ,:;.'()")[:120].encode())
        self._trailers = status if self._begun else _HEAD + status
        self.flush()

    def drop(self) -> None:
        """Nothing more can be sent."""
        self._connection.hold(-len(self._unsent))
        self._unsent.clear()

    def flush(self) -> None:
        """Sends what the peer's windows allow."""
        while self._unsent:
            size = min(len(self._unsent), h2.MOST_FRAME_BYTES, self.window, self._connection.window)
            if size <= 0 or not self._connection.spend(self, size):
                return
            self._connection.write(h2.frame(h2.DATA, 0, self.id, bytes(self._unsent[:size])))
            del self._unsent[:size]
            self._connection.hold(-size)
        if self._trailers is not None:
            self._connection.write(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, self.id, self._trailers))
            if not self.half_closed:
                self._connection.write(h2.frame(h2.RST_STREAM, 0, self.id, h2.NO_ERROR.to_bytes(4)))
            self._connection.forget(self)
