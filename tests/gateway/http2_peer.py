"""A connection to the picker's port without a socket, for tests."""

import asyncio
from typing import Any

import hpack

from tidegate_gateway import reading_turns, tenant_budget
from tidegate_gateway.edge import http2_connection, http2_frames, http2_server, http2_stream, unread_answers

http2_connection.TURN_S = 3600.0  # frames are fed without an event loop, in which a connection could wait for its turn


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed, self.aborted = b"", False, False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


ECHOES: list["Echo"] = []


class Echo:
    """Sends back what comes."""

    def __init__(self, stream: http2_stream.Stream) -> None:
        self.stream = stream
        self.resets = 0
        ECHOES.append(self)

    def on_message(self, message: bytes) -> None:
        self.stream.send(message)

    def on_half_close(self) -> None:
        self.stream.finish()

    def on_reset(self) -> None:
        self.resets += 1


class Refusing:
    """A method that needs a key, which no caller has."""

    def __init__(self, stream: http2_stream.Stream) -> None:
        stream.is_unknown = True
        stream.finish(16, "send a key")

    def on_message(self, message: bytes) -> None:
        pass

    def on_half_close(self) -> None:
        pass

    def on_reset(self) -> None:
        pass


class EndlessTurns(reading_turns.ReadingTurns):
    """The time of a turn of the event loop is never spent."""

    def spend(self, seconds: float) -> None:
        pass


def connection(*, takes_turns: bool = False, streams: int = 10) -> tuple[http2_connection.Connection, Transport]:
    ECHOES.clear()
    bounds = http2_server.Bounds(message_bytes=100_000, streams=streams, connections=1, connections_per_address=1)
    server = http2_server.Server(
        {"/echo": Echo, "/keys": Refusing}, bounds, unread_answers.UnreadAnswers(), tenant_budget.TenantBudget(450_000)
    )
    if not takes_turns:
        server.turns = EndlessTurns()
    made, transport = server(), Transport()
    made.connection_made(transport)
    return made, transport


def opened(number: int, *headers: tuple[bytes, bytes], ends: bool = False, never_indexed: bool = False) -> bytes:
    """A stream of the method /echo. `never_indexed` headers leave the table of the decoder as it is."""
    of_grpc = [(b":method", b"POST"), (b":path", b"/echo"), (b"content-type", b"application/grpc")]
    further = [hpack.NeverIndexedHeaderTuple(*each) for each in headers] if never_indexed else headers
    block = hpack.Encoder().encode([*of_grpc, *further], huffman=False)
    flags = http2_frames.END_HEADERS | (http2_frames.END_STREAM if ends else 0)
    return http2_frames.frame(http2_frames.HEADERS, flags, number, block)
