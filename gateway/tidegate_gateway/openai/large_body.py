"""Which large body can be no call, whatever follows? A body is looked at in blocks while it arrives.

A body with too many values, or with a long text in a field that takes none, is refused after a part of it. Otherwise the
gateway would read and parse all of a body with a million stop strings, or with a grammar of several MB. What cannot be seen
here is found after the parse, by the endpoint and by `engine_fields`: for example texts in lists, which are never judged
here, because the texts of messages are in lists. Each text of a field counts, also of one that the body has twice.
"""

import re

import orjson

from tidegate_gateway.openai import bounded_json, engine_body, engine_fields, parsed_request

BLOCK_BYTES = bounded_json.UNCOUNTED_BYTES
"""The bytes between two looks."""
MOST_TEXTS = 65_536
"""Texts of a body, with the names of its fields."""
MOST_VALUES = 600_000
"""Values of a body: more than token ids that the prompts of a request may have. Their parse takes up to 30 ms."""
MOST_ESCAPE = 6
"""Bytes of a character that is escaped, as in `\\u0041`; without the escape it has one byte."""
LONG_TEXT_BYTES = MOST_ESCAPE * engine_fields.LEAST_TEXT_BYTES
"""A text is no longer than any field allows until it has more."""
MOST_BEFORE_BYTES = BLOCK_BYTES
"""Of a body before a text whose field is sought."""
MOST_BEFORE_PARTS = 1000
"""Lists and objects there, so that the parse takes less than a millisecond."""
MOST_PASSED = 256
"""Quotation marks in a text, and backslashes, that are passed over on the way back to its beginning."""
MOST_LEVELS = 4
"""Objects around a text whose field is sought."""
NAME_BYTES = 128
_NAME = re.compile(rb'([{,])\s*"([^"\\]+)"\s*:\s*\Z')


class LargeBody:
    """What has been seen of one body."""

    def __init__(self) -> None:
        self._count = bounded_json.PartCount(parsed_request.MOST_PARTS, MOST_TEXTS, MOST_VALUES)
        self._text_bytes = 0
        """The bytes of the last blocks, in which no text begins or ends: those of one text, or blanks or numbers."""
        self._field = ""
        """The field of the body that holds that text, if it is known to have a bound."""
        self._most_text_bytes = 0
        """The bound."""
        self.seen = 0
        """The bytes so far."""

    def add(self, block: bytes, body: list[bytes]) -> None:
        """Looks at the next block; `body` is all so far, with this block. Raises `BadRequest`."""
        self.seen += len(block)
        try:
            self._count.add(block)
        except bounded_json.TooManyParts as error:
            raise parsed_request.not_taken(error) from None  # whose frames would keep the body
        if not _is_within_text(block):
            self._text_bytes, self._field = 0, ""
            return
        was_long = self._text_bytes > LONG_TEXT_BYTES
        self._text_bytes += len(block)
        before = self.seen - self._text_bytes
        if self._text_bytes > LONG_TEXT_BYTES and not was_long and before <= MOST_BEFORE_BYTES + BLOCK_BYTES:
            self._field = field_of_text(b"".join(body)[:before])
            self._most_text_bytes = engine_fields.most_text_bytes(self._field)
        if self._field and self._text_bytes > MOST_ESCAPE * self._most_text_bytes:
            raise engine_fields.too_large(self._field, self._most_text_bytes)


def _is_within_text(block: bytes) -> bool:
    """No text begins or ends in the block: each quotation mark is escaped, by a backslash that is not escaped itself."""
    return b'"' not in block or (block.count(b'"') == block.count(b'\\"') and b'\\\\"' not in block)


def field_of_text(before: bytes) -> str:
    """The field at the top of a body that holds the text which begins near the end of `before`, directly or in further
    objects. "" if there is none, if the gateway removes the field, or if it cannot be found with little work.

    What follows the last quotation mark that is not escaped is a text only if a name and a colon come before the mark.
    They may be in a text themselves, and the mark its end; then what comes before them is no JSON, however it is closed.
    """
    quote = _last_quote(before)
    first = max(0, quote - NAME_BYTES)
    found = _NAME.search(before[first : max(0, quote)])
    if found is None:
        return ""
    outer = before[: first + found.end(1)].removesuffix(b",")
    if len(outer) > MOST_BEFORE_BYTES or outer.count(b"[") + outer.count(b"{") > MOST_BEFORE_PARTS:
        return ""
    for levels in range(1, MOST_LEVELS + 1):
        try:
            body = orjson.loads(outer + levels * b"}")
        except orjson.JSONDecodeError:
            continue
        last = str(next(reversed(body), ""))  # where further objects are open, they are the value of this name
        field = found[2].decode("utf-8", "replace") if levels == 1 else last
        return "" if field in engine_body.ENGINE_KNOBS or field in engine_body.MERGED else field
    return ""


def _last_quote(before: bytes) -> int:
    """Where the last quotation mark is that is not escaped; -1 if it is not found with little work."""
    quote, passed = before.rfind(b'"'), 0
    while quote >= 0 and passed < MOST_PASSED:
        slashes = 0
        while passed < MOST_PASSED and before[quote - slashes - 1 : quote - slashes] == b"\\":
            slashes += 1
            passed += 1
        if slashes % 2 == 0:
            return quote if passed < MOST_PASSED else -1
        quote = before.rfind(b'"', 0, quote)
        passed += 1
    return -1
