"""What a connection over HTTP/1.1 has sent and what is not parsed yet. The work of parsing counts, not the bytes of the
bodies: chunks of one byte, chunk extensions and trailers cost as much as large bodies do.

What arrives is parsed in pieces, until the connection has had its time. The rest waits for the connection's turn, and so
does all that arrives in a turn of the event loop whose time is spent (`reading_turns`).
"""

import asyncio
import time
from collections.abc import Callable

from tidegate_gateway import reading_turns
from tidegate_gateway.openai import error_table
from tidegate_policy.model import DropReason

PIECE_BYTES = 16 * 1024
"""Parsed between two looks at the clock: 2 ms at most, where the chunks have one byte each."""
TURN_S = 0.002
"""What a connection has sent is parsed for so long at a time."""
SMALL_PIECE_BYTES, SMALL_TURN_S = 512, 0.0003
"""The same for a connection that goes first because it has brought few bytes. Most requests need less; what is left, such
as further requests of the same connection, waits among those that have brought many."""
LARGE_BYTES = 64 * 1024
"""More of a request, with the framing of its chunks, is read in turns with the other connections."""


class IncomingBytes:
    """The bytes of one connection."""

    def __init__(
        self,
        turns: reading_turns.ReadingTurns,
        parse: Callable[[bytes], bool],
        reject: Callable[[error_table.GatewayError], None],
    ) -> None:
        """`parse` takes the next bytes, and returns whether further ones may be parsed. `reject` refuses a client for whose
        bytes there is no place."""
        self._turns = turns
        self._parse = parse
        self._reject = reject
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        """What waits for the connection's turn."""
        self._wants = True
        """The connection wants to have more."""
        self._in_line = False
        self._goes_first = False
        """It is in the line of those that have brought few bytes."""
        self._address = ""
        self._request_bytes = 0
        """Of the present request, with the framing of its chunks."""

    @property
    def waits(self) -> bool:
        """Something has arrived that is not parsed yet."""
        return bool(self._rest)

    def begin(self, transport: asyncio.Transport, address: str = "") -> None:
        """The transport that is paused while nothing more is wanted, and the address of the client."""
        self._transport, self._address = transport, address

    def end(self) -> None:
        """The connection is lost."""
        self._turns.waited(len(self._rest))
        if self._in_line:
            self._turns.leave(self._read_on)
        self._rest, self._transport = b"", None
        self._parse, self._reject = (
            _takes_nothing,
            _refuses_nothing,
        )  # the connection would wait for the garbage collector

    def arrived(self, data: bytes) -> None:
        """The client has sent these bytes."""
        if self._rest:
            self._turns.keep(len(data))
            self._rest += data
        elif self._turns.must_wait(len(data)):
            self._rest = data
            self.take_turns()
        elif self._turns.is_spent:  # too much waits
            self._reject(error_table.Shed(DropReason.SATURATED))
            self.take_turns()
        else:
            self._take(data)

    def request_ended(self) -> None:
        """The bytes that follow belong to the next request."""
        self._request_bytes = 0

    def pause(self) -> None:
        """Nothing more is wanted for now. What has arrived is parsed all the same."""
        self._wants = False
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """More is wanted again."""
        self._wants = True
        if self._transport is not None and not self._in_line:
            self._transport.resume_reading()

    def discarded(self, size: int) -> None:
        """So many bytes of a client whose connection is over have been read, and nobody needs them."""
        self._wait_for_turn(size)

    def take_turns(self) -> None:
        """Reads nothing more until it is this connection's turn."""
        self._wait_for_turn(self._request_bytes + len(self._rest))

    def _wait_for_turn(self, size: int, *, had_turn: bool = False) -> None:
        if self._transport is not None and not self._in_line:
            self._in_line = True
            self._goes_first = size <= reading_turns.SMALL_BYTES and not had_turn
            self._transport.pause_reading()
            self._turns.join(self._read_on, self._address, is_small=self._goes_first)

    def _take(self, data: bytes, most_s: float = TURN_S, piece_bytes: int = PIECE_BYTES) -> None:
        """Parses what the time of the connection allows."""
        at, size, goes_on = 0, len(data), True
        began_at_s = now_s = time.monotonic()
        while goes_on and at < size and now_s - began_at_s <= most_s:
            piece = data if size <= piece_bytes else data[at : at + piece_bytes]
            at += len(piece)
            self._request_bytes += len(piece)
            goes_on = self._parse(piece)
            now_s = time.monotonic()
        self._turns.spend(now_s - began_at_s)
        if goes_on and at < size and self._transport is not None:
            self._rest = data[at:]
            self._turns.keep(size - at)
        if self._rest or self._request_bytes > LARGE_BYTES:
            self._wait_for_turn(self._request_bytes + len(self._rest), had_turn=True)

    def _read_on(self) -> None:
        self._in_line = False
        rest, self._rest = self._rest, b""
        self._turns.waited(len(rest))
        if rest and self._goes_first:
            self._take(rest, SMALL_TURN_S, SMALL_PIECE_BYTES)
        elif rest:
            self._take(rest)
        if self._wants and not self._in_line and self._transport is not None:
            self._transport.resume_reading()


def _takes_nothing(data: bytes) -> bool:
    return False


def _refuses_nothing(error: error_table.GatewayError) -> None:
    pass
