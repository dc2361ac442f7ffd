"""Which pool is worked on next? A queue of keys with due times.

A key is in the queue at most once, and at most one worker has it. The work is level-based, so adding a key twice has
the effect of adding it once. A key whose work fails is due again after a growing delay. A key whose work succeeds is
due again after the delay that the work returns, or when it is added.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a queue has to do now."""

    depth: int
    """Keys that are due and that no worker has."""
    age_s: float
    """How long the first of them has been due."""


class Workqueue(Generic[K]):
    """Keys to work on. `run` works until it is cancelled."""

    def __init__(self, *, expected: type[Exception]) -> None:
        """`expected` errors are logged by their message, all others with a traceback. The work on a key is not tried again
        for the `retry_after_s` of such an error, if it has any, whatever is added."""
        self._expected = expected
        self.attempted: Callable[[float, bool], None] = lambda seconds, failed: None
        """Receives the seconds of each attempt, and whether it failed."""
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = itertools.count()
        self._active: set[K] = set()
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        """The instants before which keys whose work failed must not be due."""
        self._changed = asyncio.Event()

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Makes `key` due in `delay_s` seconds at the latest, unless its last attempt asked for a longer pause."""
        at = max(asyncio.get_running_loop().time() + delay_s, self._not_before.get(key, 0.0))
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            heapq.heappush(self._heap, (at, next(self._count), key))
            self._changed.set()

    def reading(self) -> Reading:
        """What is due now."""
        now = asyncio.get_running_loop().time()
        late_s = [now - at for key, at in self._due.items() if at <= now and key not in self._active]
        return Reading(depth=len(late_s), age_s=max(late_s, default=0.0))

    async def run(self, work: Callable[[K], Awaitable[float | None]], *, at_once: int = 4) -> None:
        """Calls `work(key)` for each due key, for at most `at_once` keys at the same time. `work` returns the delay until
        the key is due again, or None if the key is due only when it is added. If `work` raises, the key is due again
        soon."""
        free = asyncio.Semaphore(at_once)
        async with asyncio.TaskGroup() as group:
            while True:
                await free.acquire()
                key = await self._take()
                group.create_task(self._serve(key, work)).add_done_callback(lambda _: free.release())

    async def _serve(self, key: K, work: Callable[[K], Awaitable[float | None]]) -> None:
        began_at_s = asyncio.get_running_loop().time()
        failed = True
        self._not_before.pop(key, None)
        try:
            delay_s = await work(key)
            self._failures.pop(key, None)
            failed = False
        except self._expected as error:
            pause_s = getattr(error, "retry_after_s", 0.0)
            self._not_before[key] = asyncio.get_running_loop().time() + pause_s
            delay_s = max(self._retry_s(key), pause_s)
            log.warning("%s: %s; next attempt in %.1f s", key, error, delay_s)
        except Exception:
            delay_s = self._retry_s(key)
            log.exception("%s: a defect; next attempt in %.1f s", key, delay_s)
        finally:
            self._active.discard(key)
            self._changed.set()
            self.attempted(asyncio.get_running_loop().time() - began_at_s, failed)
        if delay_s is not None:
            self.add(key, delay_s)

    async def _take(self) -> K:
        """The next due key that no worker has. The key is marked as active."""
        loop = asyncio.get_running_loop()
        while True:
            blocked: list[tuple[float, int, K]] = []
            taken: K | None = None
            while self._heap and self._heap[0][0] <= loop.time() and taken is None:
                at, number, key = heapq.heappop(self._heap)
                if self._due.get(key) != at:
                    continue  # an earlier due time has replaced this entry
                if key in self._active:
                    blocked.append((at, number, key))
                else:
                    taken = key
            until = self._heap[0][0] if self._heap else None
            for entry in blocked:
                heapq.heappush(self._heap, entry)
            if taken is not None:
                del self._due[taken]
                self._active.add(taken)
                return taken
            await self._wait(until)

    async def _wait(self, until: float | None) -> None:
        """Waits until a key is added, a worker finishes, or the instant `until`, when the next key is due."""
        self._changed.clear()
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _retry_s(self, key: K) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return float(min(FIRST_RETRY_S * 2 ** min(failures - 1, 20), LAST_RETRY_S))
