"""Answers that their clients do not read. Their bytes are bounded in sum, so many clients that ask for long answers and
read none of them do not fill the memory."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

LONG_BYTES = 64 * 1024
"""Shorter rests of answers do not count."""
SOFT_BYTES, MOST_BYTES = 64 * 1024 * 1024, 256 * 1024 * 1024
"""Above the first, clients that take nothing are cut; above the second, whoever waits longest."""
LOOK_S = 0.05
"""Between two looks at all clients above the first, because a look takes up to a millisecond."""
PATIENCE_S = 2.0
"""A client that has taken something within this time takes its answer."""


@dataclass(slots=True)
class _Rest:
    """What a client has not taken of an answer."""

    bytes: int
    more: int
    """Those of `bytes` that its transport does not have yet."""
    taken_at_s: float
    """When it became smaller, or began."""


class UnreadAnswers:
    """The connections of a listener whose clients have not taken all of an answer, those that wait longest first."""

    def __init__(
        self,
        soft_bytes: int = SOFT_BYTES,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._soft_bytes, self._most_bytes = soft_bytes, most_bytes
        self._clock = clock
        self._waiting: dict[asyncio.Transport, _Rest] = {}
        self._looked_at_s = -math.inf
        self.bytes = 0

    def enter(self, transport: asyncio.Transport, more: int = 0) -> None:
        """The connection waits for its client, or goes on to wait, with `more` bytes than its transport has."""
        size = transport.get_write_buffer_size() + more
        if size <= LONG_BYTES:
            self.leave(transport)
            return
        self._note(transport, size, more)
        if self.bytes > self._most_bytes or (
            self.bytes > self._soft_bytes and self._clock() - self._looked_at_s >= LOOK_S
        ):
            self._make_room()

    def leave(self, transport: asyncio.Transport) -> None:
        """It waits no longer."""
        rest = self._waiting.pop(transport, None)
        if rest is not None:
            self.bytes -= rest.bytes

    def _note(self, transport: asyncio.Transport, size: int, more: int) -> None:
        rest = self._waiting.get(transport)
        if rest is None:
            rest = self._waiting[transport] = _Rest(0, more, self._clock())
        elif size < rest.bytes:
            rest.taken_at_s = self._clock()
        self.bytes += size - rest.bytes
        rest.bytes, rest.more = size, more

    def _make_room(self) -> None:
        self._looked_at_s = now_s = self._clock()
        impatient_s = now_s - PATIENCE_S
        for transport, rest in list(self._waiting.items()):
            self._note(transport, transport.get_write_buffer_size() + rest.more, rest.more)
            if rest.taken_at_s <= impatient_s and self.bytes > self._soft_bytes:
                self._cut(transport)
        for transport in list(self._waiting):
            if self.bytes > self._most_bytes:
                self._cut(transport)

    def _cut(self, transport: asyncio.Transport) -> None:
        self.leave(transport)
        transport.abort()
