"""The heads of streams of HTTP/2: their path and headers, from compressed bytes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import hpack

from tidegate_gateway.edge import http2_frames

MOST_MEMORIZED, MEMORIZED_BYTES = 16, 4096
"""Heads that a connection remembers, and the bytes of each."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a stream."""

    path: str
    headers: tuple[tuple[str, str], ...]
    """Names and values that are text, without those of HTTP/2 itself."""
    bytes: int

    def value(self, name: str) -> str:
        """The value of a header; "" if there is none."""
        return next((value for other, value in self.headers if other == name), "")


class HeadDecoder:
    """Decodes the heads of one connection. The heads of a client repeat, so one that leaves the table of the decoder as it
    is counts for the next equal bytes too, until a head changes the table."""

    def __init__(self, most_bytes: int) -> None:
        self._decoder = hpack.Decoder()
        self._decoder.max_header_list_size = most_bytes
        self._known: dict[bytes, Head] = {}

    def head(self, block: bytes) -> Head:
        """The head of these bytes. Raises `ConnectionBroken`."""
        known = self._known.get(block)
        if known is not None:
            return known
        entries = self._decoder.header_table.dynamic_entries
        count, newest = len(entries), entries[0] if entries else None
        try:
            found = _head(self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            code = http2_frames.COMPRESSION_ERROR
            raise http2_frames.ConnectionBroken(code, f"a head cannot be read: {error}") from error
        if len(entries) != count or (entries and entries[0] is not newest) or len(self._known) >= MOST_MEMORIZED:
            self._known.clear()
        elif found.bytes <= MEMORIZED_BYTES:
            self._known[block] = found
        return found


def _head(decoded: Iterable[tuple[bytes, bytes]]) -> Head:
    """The head of these headers. Raises `ConnectionBroken`."""
    path, pairs, size = "", [], 0
    for name, value in decoded:
        size += len(name) + len(value)
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise http2_frames.ConnectionBroken(http2_frames.PROTOCOL_ERROR, "a header has control characters")
        if name == b":path":
            path = value.decode("latin-1")
        elif not name.startswith(b":") and not name.endswith(b"-bin"):
            pairs.append((name.decode("latin-1"), value.decode("latin-1")))
    return Head(path, tuple(pairs), size)
