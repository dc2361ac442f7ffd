"""Connections that bring many bytes are read in turns, so that one turn of the event loop reads few bytes, however many
connections have some."""

import asyncio
import time
from collections.abc import Callable

from tidegate_gateway import turn_line

AT_ONCE = 2
"""Connections that are read in one turn of the event loop; the kernel gives at most 256 KiB of each."""
STEP_S = 0.01
"""The time that one turn of the event loop gives to what connections without a turn have sent."""
READ_S = 0.00001
"""The part of that time that counts for each read of a socket, beside the work for its bytes: about what the event loop
itself takes to bring them."""
SMALL_BYTES = 4 * 1024
"""The requests of most clients have fewer."""
MOST_BYTES = 128 * 1024 * 1024
"""What has been read and waits for a turn; beyond that, it is looked at when it comes."""


class ReadingTurns:
    """Two lines of connections, in which the addresses of clients take turns. A connection stops reading when it joins a
    line; one that sends nothing is in none, so a slow client holds up nobody. Those that have brought few bytes go before
    those that have brought many, for half the time of a step at most."""

    def __init__(self) -> None:
        self._line: turn_line.TurnLine[Callable[[], None]] = turn_line.TurnLine()
        self._small: turn_line.TurnLine[Callable[[], None]] = turn_line.TurnLine()
        self._resting: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._scheduled = False
        self.spent_s = 0.0
        """In this turn of the event loop."""
        self._waiting_bytes = 0

    def must_wait(self, size: int) -> bool:
        """Whether `size` bytes that a connection has sent are to wait for its turn, because the time of this turn of the
        event loop is spent. They count until `waited`."""
        waits = self.is_spent and self._waiting_bytes + size <= MOST_BYTES
        self._waiting_bytes += size * waits
        return waits

    def keep(self, size: int) -> None:
        """So many bytes that a connection has sent wait for its turn, until `waited`."""
        self._waiting_bytes += size

    def waited(self, size: int) -> None:
        """So many bytes wait no longer."""
        self._waiting_bytes -= size

    def spend(self, seconds: float) -> None:
        """So much time was taken by what a connection has sent, beside the read of it."""
        if not self.spent_s:
            asyncio.get_running_loop().call_soon(self._begin)
        self.spent_s += seconds + READ_S

    @property
    def is_spent(self) -> bool:
        """The time of this turn of the event loop is spent."""
        return self.spent_s > STEP_S

    def join(
        self, resume: Callable[[], None], address: str = "", *, is_small: bool = False, after_s: float = 0.0
    ) -> None:
        """`resume` is called when it is the turn of a connection from this address to read on. The connection joins a line
        `after_s` seconds from now."""
        if after_s > 0.0:
            loop = asyncio.get_running_loop()
            self._resting[resume] = loop.call_later(after_s, self._rested, resume, address, is_small)
            return
        (self._small if is_small else self._line).add(address, resume)
        self._schedule()

    def leave(self, resume: Callable[[], None]) -> None:
        """The connection is lost. Its place would be one of the few of a turn, and would keep what the connection has."""
        self._line.remove(resume)
        self._small.remove(resume)
        if rest := self._resting.pop(resume, None):
            rest.cancel()

    def __len__(self) -> int:
        """The connections that wait for their turn."""
        return len(self._line) + len(self._small)

    def _rested(self, resume: Callable[[], None], address: str, is_small: bool) -> None:
        del self._resting[resume]
        self.join(resume, address, is_small=is_small)

    def _begin(self) -> None:
        self.spent_s = 0.0

    def _schedule(self) -> None:
        if (self._line or self._small) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        until_s = time.monotonic() + STEP_S / 2
        try:
            for _ in range(len(self._small)):
                self._small.pop()()  # which may join a line again
                if time.monotonic() > until_s:
                    break
            for _ in range(min(AT_ONCE, len(self._line))):
                self._line.pop()()
        finally:
            self._schedule()
