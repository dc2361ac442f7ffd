"""How many entries does a message have? They are counted before it is decoded, because a decoded entry takes a hundred
times its bytes.

The count follows the wire format of protobuf (https://protobuf.dev/programming-guides/encoding/), and looks only into
fields that hold messages.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor, message

from tidegate_gateway.openai.error_table import BadRequest

DEPTH = 100
"""The library for protobuf decodes no message that is deeper."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Nested = Mapping[int, Any]
"""By the number of a field that holds messages: the `Nested` of those."""


def nested(kind: descriptor.Descriptor, *, maps: bool = False) -> Nested:
    """What `count` needs to know of a kind of messages. An item of a map counts once, or with its key and its value."""
    return _nested(kind, maps, {})


def _nested(kind: descriptor.Descriptor, maps: bool, known: dict[str, dict[int, Any]]) -> Nested:
    if kind.full_name not in known:
        found = known[kind.full_name] = {}  # a message may contain itself
        for field in kind.fields:
            one = field.message_type
            if one is not None and (maps or not one.GetOptions().map_entry):
                found[field.number] = _nested(one, maps, known)
    return known[kind.full_name]


def count(raw: bytes, fields: Nested, most: int) -> int:
    """The entries of a message. Raises `BadRequest` if there are more than `most`, `DecodeError` if it is no message."""
    try:
        left = _count(raw, 0, len(raw), fields, most, 0)
    except IndexError as error:
        raise message.DecodeError("the message ends within a field") from error
    if left < 0:
        raise BadRequest(f"the message has more than {most} entries; send fewer")
    return most - left


def some(raw: bytes, fields: Nested, most: int) -> int | None:
    """The entries of a message; None if there are more than `most`. Raises `DecodeError` if it is no message."""
    try:
        return count(raw, fields, most)
    except BadRequest:
        return None


def _count(raw: bytes, at: int, end: int, fields: Nested, left: int, depth: int) -> int:
    """Counts the entries between two offsets, while there may be more; returns how many more there may be, -1 if there are
    too many."""
    if depth > DEPTH:
        raise message.DecodeError(f"messages stand in messages more than {DEPTH} times")
    while at < end and left >= 0:
        left -= 1
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == _BYTES:
            size, at = _varint(raw, at)
            if at + size > end:
                raise message.DecodeError("a field is longer than its message")
            if (inner := fields.get(tag >> 3)) is not None:
                left = _count(raw, at, at + size, inner, left, depth + 1)  # nothing is counted once there are too many
            at += size
        elif wire == _VARINT:
            _, at = _varint(raw, at)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise message.DecodeError("groups are not used")
    return left


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at an offset, and the offset after it."""
    byte = raw[at]
    at += 1
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise message.DecodeError("a number has more than ten bytes")
    return value, at
