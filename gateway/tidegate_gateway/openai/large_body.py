"""Which large body can be no call, whatever follows? A body is looked at in blocks while it arrives.

A body with too many values, or with a long text in a field that takes none, is refused after a part of it. Otherwise the
gateway would read and parse all of a body with a million stop strings, or with a grammar of several MB. What cannot be seen
here is found after the parse, by the endpoint and by `engine_fields`.
"""

import re

import orjson

from tidegate_gateway.openai import bounded_json, engine_fields, parsed_request

BLOCK_BYTES = bounded_json.UNCOUNTED_BYTES
"""The bytes between two looks."""
MOST_TEXTS = 65_536
"""Texts of a body, with the names of its fields."""
MOST_ESCAPE = 6
"""Bytes of a character that is escaped, as in `\\u0041`; without the escape it has one byte."""
MOST_BEFORE_BYTES = 4 * BLOCK_BYTES
"""Of a body before a text whose field is sought. This much is parsed within milliseconds."""
MOST_QUOTES = 64
"""Quotation marks in a text that are passed over on the way back to its beginning."""
MOST_LEVELS = 4
"""Objects around a text whose field is sought."""
_NAME_BYTES = 128
_NAME = re.compile(rb'([{,])\s*"([^"\\]+)"\s*:\s*\Z')


class LargeBody:
    """What has been seen of one body."""

    def __init__(self) -> None:
        self._count = bounded_json.PartCount(parsed_request.MOST_PARTS, MOST_TEXTS)
        self._text_bytes = 0
        """Of the text that goes on at the end, in whole blocks."""
        self._field, self._most_text_bytes = "", 0
        """The field of that text, if it is known, and the bytes of its longest text."""
        self.seen = 0
        """The bytes so far."""

    def add(self, block: bytes, body: list[bytes]) -> None:
        """Looks at the next block; `body` is all so far, with this block. Raises `BadRequest`."""
        self.seen += len(block)
        try:
            self._count.add(block)
        except bounded_json.TooManyParts as error:
            raise parsed_request.not_taken(error) from error
        if not _is_within_text(block):
            self._text_bytes, self._field = 0, ""
            return
        before, least = self.seen - len(block) - self._text_bytes, MOST_ESCAPE * engine_fields.LEAST_TEXT_BYTES
        was_long, self._text_bytes = self._text_bytes > least, self._text_bytes + len(block)
        if self._text_bytes > least and not was_long and before <= MOST_BEFORE_BYTES:
            self._field = field_of_text(b"".join(body)[:before])
            self._most_text_bytes = engine_fields.most_text_bytes(self._field)
        if self._field and self._text_bytes > MOST_ESCAPE * self._most_text_bytes:
            raise engine_fields.too_large(self._field, self._most_text_bytes)


def _is_within_text(block: bytes) -> bool:
    """No text begins or ends in the block. Its bytes may be blanks or numbers, too."""
    return b'"' not in block or (block.count(b'"') == block.count(b'\\"') and b'\\\\"' not in block)


def field_of_text(before: bytes) -> str:
    """The field at the top of a body that holds the text which begins near the end of `before`, directly or in further
    objects; "" if there is none, or if it cannot be found with little work."""
    quote = before.rfind(b'"')
    for _ in range(MOST_QUOTES):
        if before[quote - 1 : quote] != b"\\":
            break
        quote = before.rfind(b'"', 0, quote)
    first = max(0, quote - _NAME_BYTES)
    found = _NAME.search(before[first : max(0, quote)])
    if found is None:
        return ""
    outer = before[: first + found.end(1)].removesuffix(b",")
    for levels in range(1, MOST_LEVELS + 1):
        try:
            body = orjson.loads(outer + levels * b"}")
        except orjson.JSONDecodeError:
            continue
        if not isinstance(body, dict):
            break
        return str(next(reversed(body))) if levels > 1 else found[2].decode("utf-8", "replace")
    return ""
