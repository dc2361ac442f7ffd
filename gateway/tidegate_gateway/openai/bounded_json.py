"""JSON from clients and engines, with a bound on the time that a parse takes.

The time grows with the lists, objects and fields of a document much faster than with its text: 15 MB of `[]` take
seconds, in which nothing else runs. So they are counted before the parse. The count includes brackets within texts,
because a search for bytes is all that is quick enough.
"""

from typing import Any

import orjson

UNCOUNTED_BYTES = 64 * 1024
"""A document of this size is parsed within a few milliseconds, whatever it contains."""


class TooManyParts(ValueError):
    """The document has too many lists, objects and fields."""


def loads(raw: bytes, *, most_parts: int) -> Any:
    """The JSON value in `raw`; 200,000 parts take about 20 ms. Raises `TooManyParts`, and `ValueError` for other bytes."""
    if len(raw) > UNCOUNTED_BYTES and sum(map(raw.count, (b"[", b"{", b'":'))) > most_parts:
        raise TooManyParts(f"it has more than {most_parts} lists, objects and fields")
    return orjson.loads(raw)
