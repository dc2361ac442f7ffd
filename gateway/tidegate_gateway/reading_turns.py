"""Connections that bring many bytes are read in turns, so that one turn of the event loop reads few bytes, however many
connections have some."""

import asyncio
import collections
from collections.abc import Callable

AT_ONCE = 2
"""Connections that are read in one turn of the event loop; the kernel gives at most 256 KiB of each."""


class ReadingTurns:
    """A line of connections. A connection stops reading when it joins the line; one that sends
    nothing is not in it, so a slow client holds up nobody."""

    def __init__(self) -> None:
        self._line: collections.deque[Callable[[], None]] = collections.deque()
        self._scheduled = False

    def join(self, resume: Callable[[], None]) -> None:
        """`resume` is called when it is the connection's turn to read on."""
        self._line.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if self._line and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        try:
            for _ in range(min(AT_ONCE, len(self._line))):
                self._line.popleft()()  # which may join the line again
        finally:
            self._schedule()
