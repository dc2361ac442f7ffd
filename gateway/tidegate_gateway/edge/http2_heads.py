"""The heads of streams of HTTP/2: their path and headers, from compressed bytes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import hpack

from tidegate_gateway.edge import http2_frames as h2

MOST_BYTES = 32 * 1024
"""Of a head; peers are told, and not all of them heed it."""
READ_BYTES, COMPRESSED_BYTES = 4 * MOST_BYTES, 2 * MOST_BYTES
"""Heads up to this size, and as they are sent, are read, so that what they say of later heads is known, and their streams
are refused. A larger one ends the connection, and with it the calls of others if a proxy shares it; Envoy lets 60 KiB pass.
"""
FRAME_FIELDS, FRAME_BYTES = 32, 2048
"""A head with more fields, or more compressed bytes, costs as much as several frames."""
MOST_MEMORIZED, MEMORIZED_BYTES = 16, 4096
"""Heads that a connection remembers, and the bytes of each."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CONTENT_TYPE = re.compile(r"application/grpc(\+proto)?\s*(;.*)?", re.ASCII | re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a stream."""

    path: str
    headers: tuple[tuple[str, str], ...]
    """Names and values that are text, without those of HTTP/2 itself."""
    bytes: int
    error: int | None
    """The code with which the stream is refused, because the head is malformed or too large."""
    is_grpc: bool
    """Its method and its content type are those of gRPC."""
    frames: int = 1
    """If it brings no call, it counts as so many frames (`frame_allowance`)."""

    def value(self, name: str) -> str:
        """The value of a header; "" if there is none."""
        return next((value for other, value in self.headers if other == name), "")


class HeadDecoder:
    """Decodes the heads of one connection. The heads of a client repeat, so one that leaves the table of the decoder as it
    is counts for the next equal bytes too, until a head changes the table."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._decoder.max_header_list_size = READ_BYTES
        self._known: dict[bytes, Head] = {}
        self._number = self._flags = 0
        self._parts: bytearray | None = None

    @property
    def continues(self) -> int | None:
        """The stream whose head has begun and is not whole."""
        return None if self._parts is None else self._number

    def begin(self, number: int, flags: int, block: bytes) -> None:
        """The beginning of a head that comes in several frames."""
        self._number, self._flags, self._parts = number, flags, bytearray(block)

    def go_on(self, block: bytes) -> None:
        """A further part of the head that has begun. Raises `ConnectionBroken`."""
        if self._parts is None:
            raise h2.ConnectionBroken(h2.PROTOCOL_ERROR, "a continuation continues nothing")
        self._parts += block
        if len(self._parts) > COMPRESSED_BYTES:
            raise h2.ConnectionBroken(h2.ENHANCE_YOUR_CALM, "a head is too large")

    def end(self) -> tuple[int, int, bytes]:
        """The head that has begun is whole: its stream, the flags of its first frame, and all its parts."""
        block, self._parts = bytes(self._parts or b""), None
        return self._number, self._flags, block

    def head(self, block: bytes) -> Head:
        """The head of these bytes. Raises `ConnectionBroken`."""
        known = self._known.get(block)
        if known is not None:
            return known
        entries = self._decoder.header_table.dynamic_entries
        count, newest = len(entries), entries[0] if entries else None
        try:
            decoded = list(self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            raise h2.ConnectionBroken(h2.COMPRESSION_ERROR, f"a head cannot be read: {error}") from error
        found = _head(decoded, 1 + len(decoded) // FRAME_FIELDS + len(block) // FRAME_BYTES)
        if len(entries) != count or (entries and entries[0] is not newest) or len(self._known) >= MOST_MEMORIZED:
            self._known.clear()
        elif found.bytes <= MEMORIZED_BYTES:
            self._known[block] = replace(found, frames=1)
        return found


def _head(decoded: Iterable[tuple[bytes, bytes]], frames: int) -> Head:
    """The head of these headers, which costs as much as so many frames."""
    path, method, content_type, pairs, size, error = "", b"", "", [], 0, None
    for name, value in decoded:
        size += len(name) + len(value) + 32  # as RFC 9113, 6.5.2, counts
        if _CONTROL.search(name) or _CONTROL.search(value):
            error = h2.PROTOCOL_ERROR
        elif name == b":path":
            path = value.decode("latin-1")
        elif name == b":method":
            method = value
        elif not name.startswith(b":") and not name.endswith(b"-bin"):
            pairs.append((name.decode("latin-1"), value.decode("latin-1")))
            if name == b"content-type":
                content_type = pairs[-1][1]
    if size > MOST_BYTES:
        error = h2.ENHANCE_YOUR_CALM
    is_grpc = method == b"POST" and _CONTENT_TYPE.fullmatch(content_type) is not None
    return Head(path, tuple(pairs), size, error, is_grpc, frames)
