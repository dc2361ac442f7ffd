"""Which pool is worked on next? A queue of keys with due times.

A key is in the queue at most once, and at most one worker has it. The work is level-based, so adding a key twice has
the effect of adding it once. A key whose work fails is due again after a growing delay. A key whose work succeeds is
due again after the delay that the work returns, or when it is added.

The keys of a group, for example the pools of a namespace, share a part of the workers, and the groups take turns. So slow
work on many keys of one group delays no other group by more than one turn. A key has one entry that counts: among those
that are due later, or among the due keys of its group. An active key has none until its work ends.
"""

import asyncio
import collections
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


def _one_group(key: Hashable) -> Hashable:
    return None


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a queue has to do now."""

    depth: int
    """Keys that are due and that no worker has."""
    age_s: float
    """How long the first of them has been due."""


class Workqueue(Generic[K]):
    """Keys to work on. `run` works until it is cancelled."""

    def __init__(self, *, expected: type[Exception], group: Callable[[K], Hashable] = _one_group) -> None:
        """`expected` errors are logged by their message, all others with a traceback. The work on a key is not tried again
        for the `retry_after_s` of such an error, if it has any, whatever is added. `group` tells the group of a key."""
        self._expected = expected
        self._group = group
        self.attempted: Callable[[float, bool], None] = lambda seconds, failed: None
        """Receives the seconds of each attempt, and whether it failed."""
        self._due: dict[K, tuple[float, int]] = {}
        """By key: when it is due, and the number of its entry in a heap. Entries of other numbers are outdated."""
        self._later: list[tuple[float, int, K]] = []
        """A heap of keys that were not due yet when they were added."""
        self._ready: dict[Hashable, list[tuple[float, int, K]]] = {}
        """By group: a heap of its due keys, never empty. The group whose turn is next comes first."""
        self._count = itertools.count()
        self._active: set[K] = set()
        self._active_of: collections.Counter[Hashable] = collections.Counter()
        """By group: its active keys. A group without any has no entry."""
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        """The instants before which keys whose work failed must not be due."""
        self._changed = asyncio.Event()

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Makes `key` due in `delay_s` seconds at the latest, unless its last attempt asked for a longer pause."""
        at = max(asyncio.get_running_loop().time() + delay_s, self._not_before.get(key, 0.0))
        if key not in self._due or at < self._due[key][0]:
            self._due[key] = (at, next(self._count))
            if key not in self._active:
                self._await(key)

    def reading(self) -> Reading:
        """What is due now."""
        now = asyncio.get_running_loop().time()
        late_s = [now - at for key, (at, _) in self._due.items() if at <= now and key not in self._active]
        return Reading(depth=len(late_s), age_s=max(late_s, default=0.0))

    async def run(
        self, work: Callable[[K], Awaitable[float | None]], *, at_once: int = 4, most_of_one: int | None = None
    ) -> None:
        """Calls `work(key)` for each due key, for at most `at_once` keys at the same time, and for at most `most_of_one` of
        one group, if given. `work` returns the delay until the key is due again, or None if the key is due only when it is
        added. If `work` raises, the key is due again soon."""
        free = asyncio.Semaphore(at_once)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await free.acquire()
                key = await self._take(most_of_one or at_once)
                tasks.create_task(self._serve(key, work)).add_done_callback(lambda _: free.release())

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
            self._put_off(key, asyncio.get_running_loop().time() + pause_s)
            delay_s = max(self._retry_s(key), pause_s)
            log.warning("%s: %s; next attempt in %.1f s at the latest", key, error, delay_s)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            delay_s = self._retry_s(key)
            log.exception("%s: a defect; next attempt in %.1f s at the latest", key, delay_s)
        finally:
            self._give_back(key)
            self.attempted(asyncio.get_running_loop().time() - began_at_s, failed)
        if delay_s is not None:
            self.add(key, delay_s)

    async def _take(self, most_of_one: int) -> K:
        """The earliest due key of the group whose turn it is. The key is marked as active. A group waits for its turn while
        it has `most_of_one` active keys."""
        loop = asyncio.get_running_loop()
        while True:
            self._collect_due(loop.time())
            for group, ready in self._ready.items():  # it passes over groups with all the workers they may have
                if self._active_of[group] < most_of_one:
                    _, _, key = heapq.heappop(ready)
                    del self._ready[group]
                    if ready:
                        self._ready[group] = ready  # after the others
                    del self._due[key]
                    self._active.add(key)
                    self._active_of[group] += 1
                    return key
            await self._wait(self._later[0][0] if self._later else None)

    def _collect_due(self, now: float) -> None:
        """Moves the keys that are due now to their groups."""
        while self._later and self._later[0][0] <= now:
            at, number, key = heapq.heappop(self._later)
            if self._due.get(key) == (at, number) and key not in self._active:
                heapq.heappush(self._ready.setdefault(self._group(key), []), (at, number, key))

    def _give_back(self, key: K) -> None:
        """The work on a key has ended. It may have been added meanwhile."""
        self._active.discard(key)
        group = self._group(key)
        self._active_of[group] -= 1
        if not self._active_of[group]:
            del self._active_of[group]
        if key in self._due:
            self._await(key)
        self._changed.set()

    def _put_off(self, key: K, until_s: float) -> None:
        """The active key must not be due before this instant, also where it was added during the work that failed."""
        self._not_before[key] = until_s
        if key in self._due and self._due[key][0] < until_s:
            self._due[key] = (until_s, next(self._count))

    def _await(self, key: K) -> None:
        heapq.heappush(self._later, (*self._due[key], key))
        self._changed.set()

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
