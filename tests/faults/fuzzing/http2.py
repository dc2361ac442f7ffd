"""Frames of HTTP/2 and compressed heads at the gRPC port.

Inputs are those of `http2_inputs`, with the preface of a client.

Property: the connection goes on or ends with GOAWAY; a call ends with no status that blames the gateway.
"""

import hpack
from fuzzing import http2_inputs, http2_ports, memory_gateway

from tidegate_gateway.edge import http2_frames as h2
from tidegate_proto.v1 import inference_pb2

_server = http2_ports.grpc_server()
_HEAD = http2_ports.head("/tidegate.v1.Inference/Generate", ("grpc-timeout", "5S"), ("x-tidegate-tenant", "a"))
_INDEXED = hpack.Encoder().encode(
    [(":method", "POST"), (":path", "/tidegate.v1.Inference/Call"), ("content-type", "application/grpc+proto")]
)
_MESSAGE = inference_pb2.GenerateRequest(model="fake", prompt="x", max_tokens=2).SerializeToString()
_DATA = b"\0" + len(_MESSAGE).to_bytes(4) + _MESSAGE
_SETTINGS = h2.SETTING.pack(h2.INITIAL_WINDOW_SIZE, 100) + h2.SETTING.pack(1, 0)
_PADDED = b"\1" + _DATA + b"\0"
_MORE = (h2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1")

FRAMES = [
    [(h2.SETTINGS, 0, 0, b""), (h2.HEADERS, h2.END_HEADERS, 1, _HEAD), (h2.DATA, h2.END_STREAM, 1, _DATA)],
    [(h2.HEADERS, h2.END_HEADERS, 1, _HEAD), (h2.DATA, 0, 1, _DATA[:9]), (h2.DATA, h2.END_STREAM, 1, _DATA[9:])],
    [(h2.HEADERS, 0, 1, _HEAD[:20]), (h2.CONTINUATION, 0, 1, _HEAD[20:40]), (h2.CONTINUATION, 4, 1, _HEAD[40:])],
    [(h2.HEADERS, h2.END_HEADERS, 1, _INDEXED), (h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 3, _INDEXED)],
    [(h2.SETTINGS, 0, 0, _SETTINGS), (h2.HEADERS, 4, 1, _HEAD), (h2.DATA, 1, 1, _DATA), _MORE],
    [(h2.HEADERS, 4, 1, _HEAD), (h2.RST_STREAM, 0, 1, b"\0\0\0\x08"), (h2.DATA, h2.END_STREAM, 1, _DATA)],
    [(h2.PING, 0, 0, bytes(8)), (h2.GOAWAY, 0, 0, bytes(8)), (h2.PRIORITY, 0, 1, bytes(5)), _MORE],
    [(h2.HEADERS, 4 | h2.PADDED | h2.WITH_PRIORITY, 1, b"\2" + bytes(5) + _HEAD + bytes(2)), (h2.DATA, 9, 1, _PADDED)],
    [(h2.HEADERS, 4, 1, _HEAD), (h2.DATA, 0, 1, _DATA), (h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, b"\x88")],
]  # fmt: skip


SEEDS = [b"\0" + http2_inputs.short(frames) for frames in FRAMES]
SEEDS += [b"\x03" + http2_inputs.short(frames) for frames in FRAMES[:3]]
SEEDS += [bytes((http2_inputs.RAW | 5,)) + h2.PREFACE + http2_inputs.whole(frames) for frames in FRAMES[:3]]
DICTIONARY = (
    "PRI * HTTP/2.0\\x0d\\x0a\\x0d\\x0aSM\\x0d\\x0a\\x0d\\x0a", ":path", ":method", "content-type", "grpc-timeout",
    "grpc-encoding", "gzip", "application/grpc", "x-tidegate-tenant", "\\x7f\\xff\\xff\\xff", "\\x20",
    "\\x3f\\xe1\\x1f", "\\x09\\x00\\x01\\x00", "\\x01\\x04\\x01", "\\x00\\x01\\x01",
    "\\x04\\x00\\x00\\x06\\x00\\x04\\xff\\xff\\xff\\xff", "\\x03\\x00\\x01\\x04\\x00\\x00\\x00\\x08",
    "\\x08\\x00\\x00\\x04\\x7f\\xff\\xff\\xff", "\\x05\\x04\\x01\\x00",
)  # fmt: skip


def try_input(data: bytes) -> None:
    if data:
        memory_gateway.run(_converse(data))


async def _converse(data: bytes) -> None:
    await http2_ports.converse(
        _server, http2_inputs.pieces(data, preface=h2.PREFACE), lambda: not http2_ports.CALLS.running
    )
