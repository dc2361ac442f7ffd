"""Frames of HTTP/2 at the client of the engines' control ports.

Inputs are those of `http2_inputs`.

Property: a call ends with a message or with `CallFailed`, and nothing that the peer sends leaves the connection.
"""

import asyncio
import socket

import hpack
from fuzzing import http2_inputs, memory_gateway

from tidegate_control import grpc_channel

_SOCKET = socket.socket(socket.AF_UNIX)
_REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/service/Method"), (":authority", "engine")]
_HEAD = hpack.Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])
_OK = hpack.Encoder().encode([("grpc-status", "0")])
_BAD = hpack.Encoder().encode([("grpc-status", "7"), ("grpc-message", "not%20you")])
_ONLY = hpack.Encoder().encode([(":status", "200"), ("grpc-status", "12")])
_MESSAGE = b"\0\0\0\0\2ab"
SETTINGS, ACK = (4, 0, 0, b"\0\4\0\0\x10\0"), (4, 1, 0, b"")

FRAMES = [
    [SETTINGS, ACK, (1, 4, 1, _HEAD), (0, 0, 1, _MESSAGE), (1, 5, 1, _OK)],
    [SETTINGS, ACK, (1, 4, 1, _HEAD), (0, 8, 1, b"\2" + _MESSAGE + b"\0\0"), (1, 5, 1, _OK)],
    [SETTINGS, (1, 0, 1, _HEAD[:3]), (9, 4, 1, _HEAD[3:]), (0, 0, 1, _MESSAGE[:3]), (0, 0, 1, _MESSAGE[3:])],
    [SETTINGS, (1, 4, 1, _HEAD), (1, 5, 1, _BAD)],
    [SETTINGS, (1, 5, 1, _ONLY), (8, 0, 0, b"\0\0\0\1"), (6, 0, 0, bytes(8)), (7, 0, 0, bytes(8))],
    [SETTINGS, (3, 0, 1, b"\0\0\0\7"), (2, 0, 1, bytes(5)), (5, 4, 1, b"\0\0\0\2\x82"), (10, 0, 0, b"\0\0h2=\"x\"")],
]  # fmt: skip


SEEDS = [b"\0" + http2_inputs.short(frames) for frames in FRAMES]
SEEDS += [b"\x03" + http2_inputs.short(frames) for frames in FRAMES[:3]]
SEEDS += [bytes((http2_inputs.RAW | 5,)) + http2_inputs.whole(frames) for frames in FRAMES]
DICTIONARY = (
    ":status", "grpc-status", "grpc-message", "%", "\\x7f\\xff\\xff\\xff", "\\x3f\\xe1\\x1f", "\\x88", "\\x01\\x04\\x01",
    "\\x00\\x01\\x01", "\\x04\\x00\\x00\\x06\\x00\\x04\\x00\\x00\\x00\\x00", "\\x03\\x00\\x01\\x04\\x00\\x00\\x00\\x08",
    "\\x08\\x00\\x00\\x04\\x7f\\xff\\xff\\xff", "\\x05\\x04\\x01\\x00", "\\x07\\x00\\x00\\x08",
)  # fmt: skip


def try_input(data: bytes) -> None:
    if data:
        memory_gateway.run(_converse(data))


async def _converse(data: bytes) -> None:
    connection = grpc_channel._Connection()
    transport = _Transport()
    connection.connection_made(transport)
    answer = connection.begin(_REQUEST, bytes(grpc_channel.PREFIX_BYTES), grpc_channel.WINDOW_BYTES // 2)
    for piece in http2_inputs.pieces(data):
        for at in range(0, len(piece), grpc_channel.READ_BYTES):
            part = piece[at : at + grpc_channel.READ_BYTES]
            if connection.ended is None:
                connection.get_buffer(-1)[: len(part)] = part
                connection.buffer_updated(len(part))
                await _read(answer)
    connection.connection_lost(None)
    assert not await _read(answer), "a call goes on though its connection has ended"
    assert not connection._answers
    assert len(transport.sent) < 1000 + 10 * len(data), "a frame causes few bytes"
    if connection._resume is not None:
        connection._resume.cancel()


async def _read(answer: grpc_channel._Answer) -> bool:
    """Whether the call goes on."""
    task = asyncio.ensure_future(_all(answer))
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        task.result()
        return False
    task.cancel()
    await asyncio.wait([task])
    return True


async def _all(answer: grpc_channel._Answer) -> None:
    try:
        while await answer.message() is not None:
            pass
    except grpc_channel.CallFailed:
        pass


class _Transport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__({"socket": _SOCKET})
        self.sent = bytearray()

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        return None

    pause_reading = resume_reading = abort
