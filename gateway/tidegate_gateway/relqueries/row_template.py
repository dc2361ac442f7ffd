"""How does a row become a prompt? A template is text with `{{column}}` in it, or a list of messages with such texts.

Single braces are text, so that a template may contain JSON. Only the values of the columns that the template names are
stored: a row is the list of their texts, in the order in which the template first names them.
"""

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate_gateway.openai import escaped_text
from tidegate_gateway.openai.error_table import BadRequest

MOST_CHARACTERS = 256 * 1024
MOST_PLACEHOLDERS = 1024
MOST_MESSAGES = 256
LONGEST_NAME = 128
SHOWN_NAMES = 8
"""Columns of a row that an error lists."""
_PLACEHOLDER = re.compile(r"\{\{([^{}\r\n]{0,160})\}\}")

Segments = tuple[str | int, ...]
"""Texts, and the places of values in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A checked template."""

    columns: tuple[str, ...]
    text: Segments | None
    """The one text of a template that is text; None if it is messages."""
    messages: tuple[tuple[Mapping[str, Any], Segments], ...] = ()
    """Each message without its content, and its content."""
    own_bytes: int = 0
    """Of its texts between the values, as JSON."""

    def texts(self, row: Mapping[str, object], where: str) -> list[str]:
        """The values of a row. Raises `BadRequest` that names the row."""
        values: list[str] = []
        for column in self.columns:
            try:
                value = row[column]
            except KeyError:
                known = ", ".join(heapq.nsmallest(SHOWN_NAMES, map(str, row)))[:200] or "none"
                sentence = f"{where} has no column {column!r}, which the template names; its columns are {known}"
                raise BadRequest(sentence, param="template") from None
            values.append(value if isinstance(value, str) else _text(value, column, where))
        return values

    def prompt_bytes(self, values: Sequence[str]) -> int:
        """Bytes of the texts of a row's prompt as JSON, computed without making them."""
        sizes = [escaped_text.json_bytes(value) for value in values]
        texts = [self.text] if self.text is not None else [content for _, content in self.messages]
        return self.own_bytes + sum(
            sizes[segment] for segments in texts for segment in segments if not isinstance(segment, str)
        )

    def prompt(self, values: Sequence[str]) -> str:
        """The text of a row; the last message of a template of messages."""
        return _filled(self.messages[-1][1] if self.text is None else self.text, values)

    def filled_messages(self, values: Sequence[str]) -> list[dict[str, Any]]:
        """The messages of a row."""
        if self.text is not None:
            return [{"role": "user", "content": _filled(self.text, values)}]
        return [{**message, "content": _filled(content, values)} for message, content in self.messages]


def parse(template: object) -> Template:
    """The template of a request. Raises `BadRequest`."""
    columns: dict[str, int] = {}
    if isinstance(template, str):
        text = _segments(template, columns, "template")
        found = Template(columns=tuple(columns), text=text, own_bytes=_own_bytes([text]))
    elif isinstance(template, list) and 0 < len(template) <= MOST_MESSAGES:
        messages: list[tuple[Mapping[str, Any], Segments]] = []
        for i, message in enumerate(template):
            where = f"template[{i}]"
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest(f"{where} must be a message with a role and a content", param=where)
            if not isinstance(message.get("content"), str):
                raise BadRequest(f"{where}.content must be text", param=f"{where}.content")
            kept = {key: value for key, value in message.items() if key != "content"}
            messages.append((kept, _segments(message["content"], columns, f"{where}.content")))
        own_bytes = _own_bytes(segments for _, segments in messages)
        found = Template(columns=tuple(columns), text=None, messages=tuple(messages), own_bytes=own_bytes)
    else:
        raise BadRequest(
            f"template must be text with {{{{column}}}} in it, or a list of 1 to {MOST_MESSAGES} messages",
            param="template",
        )
    if not columns:
        raise BadRequest("template must name at least one column, as in {{name}}", param="template")
    return found


def packed(values: Sequence[str]) -> bytes:
    """The values of a row as JSON."""
    return bytes(memoryview(orjson.dumps(values)))  # a copy, because orjson's own result holds ten times its length


def _own_bytes(texts: Iterable[Segments]) -> int:
    own = (segment for segments in texts for segment in segments if isinstance(segment, str))
    return sum(map(escaped_text.json_bytes, own))


def _segments(text: str, columns: dict[str, int], where: str) -> Segments:
    if len(text) > MOST_CHARACTERS:
        raise BadRequest(f"{where} must have at most {MOST_CHARACTERS} characters", param=where)
    pieces = _PLACEHOLDER.split(text)
    if len(pieces) > 2 * MOST_PLACEHOLDERS:
        raise BadRequest(f"{where} must have at most {MOST_PLACEHOLDERS} placeholders", param=where)
    segments: list[str | int] = []
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            if "{{" in piece:
                at = piece[piece.index("{{") :][:20]
                raise BadRequest(f"{where} has {{{{ without a column and }}}}: {at!r}", param=where)
            segments.append(piece)
        elif not 0 < len(name := piece.strip()) <= LONGEST_NAME:
            raise BadRequest(f"{where}: a column must have 1 to {LONGEST_NAME} characters", param=where)
        else:
            segments.append(columns.setdefault(name, len(columns)))
    return tuple(segments)


def _text(value: object, column: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return orjson.dumps(value).decode()
    raise BadRequest(f"{where}: column {column!r} must be text, a number, true, false or null", param="rows")


def _filled(segments: Segments, values: Sequence[str]) -> str:
    return "".join(segment if isinstance(segment, str) else values[segment] for segment in segments)
