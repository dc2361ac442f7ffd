"""Answers that their clients do not read. Their bytes are bounded in sum, so many clients that ask for long answers and
read none of them do not fill the memory."""

import asyncio

LONG_BYTES = 64 * 1024
"""Shorter rests of answers do not count."""
MOST_BYTES = 64 * 1024 * 1024
LEFT_PART = 0.9
"""So much of the bound is left in use once room was made."""


class UnreadAnswers:
    """The connections of a listener whose clients have not taken all of an answer, those that wait longest first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._waiting: dict[asyncio.Transport, int] = {}
        """The bytes that were left when the wait began."""
        self.bytes = 0

    def enter(self, transport: asyncio.Transport, more: int = 0) -> None:
        """The connection waits for its client, or goes on to wait, with `more` bytes than its transport has."""
        left = transport.get_write_buffer_size() + more
        if left <= LONG_BYTES:
            self.leave(transport)
            return
        self.bytes += left - self._waiting.get(transport, 0)
        self._waiting[transport] = left
        if self.bytes > self._most_bytes:
            self._make_room()

    def leave(self, transport: asyncio.Transport) -> None:
        """It waits no longer."""
        self.bytes -= self._waiting.pop(transport, 0)

    def _make_room(self) -> None:
        """Cuts connections: first those whose clients take nothing, then whoever waits longest."""
        for may_progress in (False, True):
            for transport, left in list(self._waiting.items()):
                if self.bytes <= LEFT_PART * self._most_bytes:
                    return
                if may_progress or transport.get_write_buffer_size() == left:
                    self.leave(transport)
                    transport.abort()
