"""JSON from clients and engines, with a bound on the time that a parse takes.

The time grows with the values of a document much faster than with its text: 15 MB of `[]` take seconds, in which nothing
else runs. So brackets, colons and commas are counted before the parse. Those within texts count too, because a search
for bytes is all that is quick enough.
"""

from typing import Any

import orjson

UNCOUNTED_BYTES = 64 * 1024
"""A document of this size is parsed within a few milliseconds, whatever it contains."""
VALUES_PER_PART = 10
BYTES_PER_QUOTE = 100
"""Where there are fewer quotation marks, they are no sign of many texts."""


class TooManyParts(ValueError):
    """The document has too many lists, objects and fields, or too many bytes."""


COSTLY_BYTES, COSTLY_PARTS = 2048, 1000
"""A document that has more bytes and more lists, objects, fields and values than this takes a millisecond or more."""


def is_costly(raw: bytes) -> bool:
    """The parse of the document, and what is done with its values, takes long enough to delay other requests."""
    if len(raw) <= COSTLY_BYTES:
        return False
    return len(raw) > UNCOUNTED_BYTES or sum(map(raw.count, (b"[", b"{", b":", b","))) > COSTLY_PARTS


ENGINE_PARTS = 120_000
"""Lists, objects and fields of a document of an engine that is parsed."""
ENGINE_BYTES = 5 * 2**20
"""Of such a document: more than the longest event of a stream."""
MOST_USAGE_BYTES = 4096


def of_engine(raw: bytes) -> Any:
    """The JSON value in a document of an engine. Raises `TooManyParts`, and `ValueError` for other bytes."""
    if len(raw) > ENGINE_BYTES:
        raise TooManyParts(f"it has more than {ENGINE_BYTES} bytes")
    return loads(raw, most_parts=ENGINE_PARTS)


def usage_of(raw: bytes) -> object:
    """The usage in an answer that is too large to be parsed, such as the log probabilities of a long answer; None if none
    is found near its end. A quotation mark within a text is escaped, so no text holds the name of the field."""
    name_at = raw.rfind(b'"usage"', max(0, len(raw) - ENGINE_BYTES))
    start = raw.find(b"{", name_at, name_at + MOST_USAGE_BYTES) if name_at >= 0 else -1
    level = 0
    for at in range(start, min(start + MOST_USAGE_BYTES, len(raw))) if start >= 0 else ():
        level += (raw[at] == ord("{")) - (raw[at] == ord("}"))
        if not level:
            try:
                return orjson.loads(raw[start : at + 1])
            except orjson.JSONDecodeError:
                return None
    return None


class PartCount:
    """Counts the parts of documents that have one bound together, and their other values."""

    def __init__(self, most_parts: int, most_texts: int = 0, most_values: int = 0) -> None:
        """With `most_texts` texts count too, and the names of fields with them. `most_values` are `VALUES_PER_PART` for
        each part unless given."""
        self._most_parts, self._most_texts = most_parts, most_texts
        self._most_values = most_values or VALUES_PER_PART * most_parts
        self._parts = self._values = self._quotes = 0

    def add(self, raw: bytes, first: int = 0, end: int | None = None) -> None:
        """Counts a document from `first` to `end`. Raises `TooManyParts`."""
        end = len(raw) if end is None else end
        for at in range(first, end, UNCOUNTED_BYTES):
            last = min(at + UNCOUNTED_BYTES, end)
            self._parts += _count(raw, b"[", at, last) + _count(raw, b"{", at, last) + _count(raw, b":", at, last)
            self._values += _count(raw, b",", at, last)
            if self._parts > self._most_parts:
                raise TooManyParts(f"it has more than {self._most_parts} lists, objects and fields")
            if self._values > self._most_values:
                raise TooManyParts(f"it has more than {self._most_values} values")
            if self._most_texts:
                self._quotes += _quotes(raw, at, last)
                if self._quotes > 2 * self._most_texts:
                    raise TooManyParts(f"it has more than {self._most_texts} texts")


def _count(raw: bytes, mark: bytes, first: int, end: int) -> int:
    """As `raw.count`, but many times quicker where there is none."""
    return raw.count(mark, first, end) if raw.find(mark, first, end) >= 0 else 0


def _quotes(raw: bytes, first: int, end: int) -> int:
    """The quotation marks around texts, where there are many. Some are missed, and those within texts do not count."""
    quotes = _count(raw, b'"', first, end)
    if quotes * BYTES_PER_QUOTE <= end - first:
        return 0
    return quotes - raw.count(b'\\"', first, end) if raw.find(b"\\", first, end) >= 0 else quotes


def loads(raw: bytes, *, most_parts: int) -> Any:
    """The JSON value in `raw`; 120,000 parts take about 30 ms. Raises `TooManyParts`, and `ValueError` for other bytes.

    A part is a list, an object or a field. Other values cost less: `VALUES_PER_PART` of them count as one."""
    if len(raw) > UNCOUNTED_BYTES:
        PartCount(most_parts).add(raw)
    return orjson.loads(raw)
