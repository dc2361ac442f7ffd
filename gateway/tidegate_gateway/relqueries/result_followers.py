"""Who waits for the next result of a relQuery that this gateway runs? Streams of results look into the store again as soon
as there is one, in place of at growing intervals."""

import asyncio
import itertools

WOKEN = 16
"""Streams that one result wakes, so that thousands of them do not hold the event loop. The others look again later."""


class ResultFollowers:
    """The streams of one relQuery that wait."""

    def __init__(self) -> None:
        self.changes = 0
        """Results that this gateway has recorded, and the end of the relQuery here."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """The one that waits longest comes first."""

    def on_change(self) -> None:
        """A result was recorded, or the relQuery runs here no more."""
        self.changes += 1
        for waiting in list(itertools.islice(self._waiting, WOKEN)):
            del self._waiting[waiting]
            if not waiting.done():
                waiting.set_result(None)

    async def change(self, seen: int, within_s: float) -> None:
        """Returns when there are more changes than `seen`, or after this time."""
        if self.changes != seen:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            await asyncio.wait({waiting}, timeout=within_s)
        finally:
            self._waiting.pop(waiting, None)
