"""The encrypted bytes of connections are decrypted in turns. A record of TLS may carry a single byte, and each costs the
event loop some microseconds, so one read of the socket of a client that sends the smallest records costs as much as
hundreds of requests.

`TlsRecords` stands between the socket and the TLS protocol of a connection. The time that the TLS protocol takes counts
as the time of a turn of the event loop (`reading_turns`), and what arrives when that time is spent waits.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tidegate_gateway import reading_turns
from tidegate_gateway.edge import client_addresses

READ_BYTES = 16 * 1024
"""Given to the TLS protocol at a time: 2 ms, where the records have one byte each."""
WAITING_BYTES = 32 * 1024
"""Records that the TLS protocol may keep while the connection reads nothing; it decrypts them at once."""


class TlsRecords(asyncio.BufferedProtocol):
    """The protocol of a socket from the client's first message on."""

    def __init__(self, plain: asyncio.Transport, turns: reading_turns.ReadingTurns) -> None:
        """Takes the place of the TLS protocol of the socket."""
        self._plain = plain
        self._turns = turns
        self._tls: Any = plain.get_protocol()
        self._address = client_addresses.address_of(plain)
        self._held = b""
        """What waits for the connection's turn."""
        self._in_line = False
        self._is_paused = False
        """Reading is paused until the connection's turn; the TLS protocol had not paused it."""
        plain.set_protocol(self)

    def get_buffer(self, sizehint: int) -> Any:
        return memoryview(self._tls.get_buffer(READ_BYTES))[:READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._held or self._turns.is_spent:
            self._hold(bytes(self.get_buffer(nbytes)[:nbytes]))
        else:
            self._count(lambda: self._tls.buffer_updated(nbytes))

    def eof_received(self) -> Any:
        self._read_all()
        return self._tls.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._in_line:
            self._turns.leave(self._take_turn)
        self._read_all()
        self._tls.connection_lost(exc)

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def _count(self, decrypt: Callable[[], None]) -> None:
        """Counts the time of the TLS protocol. What the connection does with the bytes counts there."""
        began_at_s, counted_s = time.monotonic(), self._turns.spent_s
        decrypt()
        counted_s = max(self._turns.spent_s - counted_s, 0.0)
        self._turns.spend(max(time.monotonic() - began_at_s - counted_s, 0.0))

    def _hold(self, data: bytes) -> None:
        self._held += data
        self._turns.keep(len(data))
        if self._plain.is_reading():
            self._is_paused = True
            self._plain.pause_reading()
        if not self._in_line:
            self._in_line = True
            self._turns.join(self._take_turn, self._address, is_small=len(self._held) <= reading_turns.SMALL_BYTES)

    def _take_turn(self) -> None:
        self._in_line = False
        if self._is_paused and not self._plain.is_closing():
            self._is_paused = False
            self._plain.resume_reading()  # before the TLS protocol may pause it for a reason of its own
        self._read_all()

    def _read_all(self) -> None:
        held, self._held = self._held, b""
        if held:
            self._turns.waited(len(held))
            self._count(lambda: give(self._tls, held))


def give(tls: Any, data: bytes) -> None:
    """Gives bytes to a TLS protocol, as if the socket had brought them."""
    for first in range(0, len(data), READ_BYTES):
        part = data[first : first + READ_BYTES]
        tls.get_buffer(READ_BYTES)[: len(part)] = part
        tls.buffer_updated(len(part))
