"""The frames of HTTP/2 (RFC 9113): their kinds, flags and errors, and their bytes."""

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 1, 3, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11

MOST_FRAME_BYTES = 16_384
"""Of a frame's payload: the size that every peer supports."""
FRAME = struct.Struct(">BHBBI")
"""The head of a frame: 24 bits of length in two parts, kind, flags, and the stream."""

SETTING = struct.Struct(">HI")
MOST_SETTINGS = 64
"""In one frame; there are ten kinds of settings."""


def settings(payload: bytes) -> dict[int, int]:
    """The settings of one frame. Raises `ConnectionBroken`."""
    if len(payload) % 6:
        raise ConnectionBroken(FRAME_SIZE_ERROR, "settings have six bytes each")
    if len(payload) > 6 * MOST_SETTINGS:
        raise ConnectionBroken(ENHANCE_YOUR_CALM, "too many settings")
    return dict(SETTING.iter_unpack(payload))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def unpadded(flags: int, payload: bytes) -> bytes:
    """The content of a frame of data or of a head. Raises `ConnectionBroken`."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionBroken(PROTOCOL_ERROR, "a frame is nothing but padding")
    return payload[1 : len(payload) - payload[0]]


class ConnectionBroken(Exception):
    """The peer does not keep to the protocol; the connection ends with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
