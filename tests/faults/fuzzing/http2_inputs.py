"""Inputs that are connections of HTTP/2, for the harnesses of servers and of the client.

The first byte says in which pieces an input arrives, and whether it has all bytes of a connection or one frame after the
other: kind, flags, stream and length in one byte each, and so many bytes.
"""

from collections.abc import Iterator

from fuzzing import memory_gateway

from tidegate_gateway.edge import http2_frames

RAW = 0x80
"""In the first byte: the input has all bytes."""
Frame = tuple[int, int, int, bytes]
"""Kind, flags, stream and content."""


def short(frames: list[Frame]) -> bytes:
    """Frames as an input has them, without its first byte."""
    return b"".join(bytes((kind, flags, stream, len(content))) + content for kind, flags, stream, content in frames)


def whole(frames: list[Frame]) -> bytes:
    """Frames as a connection has them."""
    return b"".join(http2_frames.frame(*frame) for frame in frames)


def pieces(data: bytes, *, preface: bytes = b"") -> Iterator[bytes]:
    """What arrives of an input; `preface` is sent before the frames of one that does not have all bytes."""
    mode, content = data[0], data[1:]
    return memory_gateway.pieces(bytes((mode & ~RAW,)) + (content if mode & RAW else preface + _framed(content)))


def _framed(data: bytes) -> bytes:
    sent, at = bytearray(), 0
    while at + 4 <= len(data):
        kind, flags, stream, size = data[at : at + 4]
        sent += http2_frames.frame(kind, flags, stream, data[at + 4 : at + 4 + size])
        at += 4 + size
    return bytes(sent)
