"""A client of the gRPC port that sends what it likes, frame by frame, and reads what it likes."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import hpack

from tidegate_gateway.edge import http2_frames as h2

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/tidegate.v1.Inference/Generate"


def message(raw: bytes, *, compressed: bool = False) -> bytes:
    """The message with its length."""
    return bytes([compressed]) + len(raw).to_bytes(4) + raw


@dataclass(slots=True)
class Answer:
    """What came on a stream."""

    head: dict[str, str] = field(default_factory=dict)
    """Headers and trailers."""
    data: bytes = b""
    is_whole: bool = False


class Peer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self.reader, self.writer = reader, writer
        self.answers: dict[int, Answer] = {}
        self.credit = 65_535
        """Bytes of messages that the connection may still carry; below 0 where more were sent."""
        self.follows = False
        self._heads = hpack.Decoder()
        self._next = 1
        settings = struct.pack(">HI", h2.INITIAL_WINDOW_SIZE, window)
        writer.write(h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0, settings))

    def open(self, path: str, *headers: tuple[str, str], message: bytes = b"", ends: bool = False) -> int:
        """Opens a stream, and sends a message with its length, or the beginning of it, if there is one; its number."""
        number, self._next = self._next, self._next + 2
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
        block = hpack.Encoder().encode([*head, ("content-type", "application/grpc"), *headers], huffman=False)
        self.writer.write(h2.frame(h2.HEADERS, h2.END_HEADERS, number, block))
        if message or ends:
            self.send(number, message, ends=ends)
        self.answers[number] = Answer()
        return number

    def send(self, number: int, data: bytes, *, ends: bool = False) -> None:
        """Sends bytes on a stream."""
        for at in range(0, len(data), h2.MOST_FRAME_BYTES):
            self.writer.write(h2.frame(h2.DATA, 0, number, data[at : at + h2.MOST_FRAME_BYTES]))
        self.credit -= len(data)
        if ends:
            self.writer.write(h2.frame(h2.DATA, h2.END_STREAM, number))

    async def ended(self, number: int, within_s: float = 20.0) -> Answer:
        """What came on a stream, once its trailers have come. Raises `EOFError` when the connection ends before."""
        async with asyncio.timeout(within_s):
            while not self.answers[number].is_whole:
                await self.read()
        return self.answers[number]

    async def read(self) -> None:
        """Reads one frame. Raises `EOFError` when the connection has ended."""
        try:
            high, low, kind, flags, number = h2.FRAME.unpack(await self.reader.readexactly(h2.FRAME.size))
            payload = await self.reader.readexactly(high << 16 | low)
        except ConnectionError as error:
            raise EOFError from error
        answer = self.answers.get(number)
        if kind == h2.HEADERS and answer is not None:
            answer.head |= dict(self._heads.decode(payload))
        elif kind == h2.DATA and answer is not None:
            answer.data += payload
        elif kind == h2.WINDOW_UPDATE and not number:
            self.credit += int.from_bytes(payload)
        elif kind == h2.SETTINGS and not flags & h2.ACK:
            self.writer.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
        elif kind == h2.PING and not flags & h2.ACK and self.follows:
            self.writer.write(h2.frame(h2.PING, h2.ACK, 0, payload))
        if kind == h2.DATA and payload and self.follows:
            self.writer.write(h2.frame(h2.WINDOW_UPDATE, 0, 0, len(payload).to_bytes(4)))
        if answer is not None and kind in (h2.HEADERS, h2.DATA):
            answer.is_whole = answer.is_whole or bool(flags & h2.END_STREAM)

    async def follow(self) -> None:
        """Reads all that comes until the connection ends, and tells the other side so."""
        self.follows = True
        with contextlib.suppress(EOFError):
            while True:
                await self.read()

    async def is_cut(self, within_s: float = 20.0) -> bool:
        """Reads until the connection ends; False if it has not within the time."""
        with contextlib.suppress(EOFError):
            try:
                async with asyncio.timeout(within_s):
                    while True:
                        await self.read()
            except TimeoutError:
                return False
        return True


@contextlib.asynccontextmanager
async def connected(target: str | None, *, window: int = 65_535) -> AsyncIterator[Peer]:
    """A connection to host:port. `window` bytes of each stream may come."""
    host, _, port = (target or "").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Peer(reader, writer, window)
    finally:
        writer.close()
