"""The ends of calls that the store could not take: they wait here until it can.

With a journal file (`store.journal`) an end is written to the file before the client has the last bytes of its answer, and
a gateway that starts again reads the file. The gateway does not wait for the disk: an end survives a killed process, not a
machine that loses its power.
"""

import asyncio
import collections
import contextlib
import errno
import fcntl
import io
import logging
import os
import pathlib
from collections.abc import Awaitable, Callable, Iterable, Iterator

import orjson

from tidegate_gateway.store import tenant_ids
from tidegate_gateway.workflows import waiting_ends

logger = logging.getLogger("tidegate.gateway")

MOST = 100_000
"""Ends that may wait. Above, ends that no client has seen are dropped first."""

AT_ONCE = 8
"""Ends that are given to the store at a time."""

LOGGED_EVERY = 1000
"""Of the ends that are dropped so many share a line of the log."""

COPIED_AT_ONCE = 16
"""Ends that are copied to a new journal with each one that is added: all 100,000 would stop the event loop for 0.4 s."""

Record = Callable[[waiting_ends.CallEnd], Awaitable[bool]]
"""Returns whether the end is recorded."""


class CallEnds:
    """The outbox of one gateway."""

    def __init__(self, journal: pathlib.Path | None = None) -> None:
        """Reads the journal. Raises `OSError` if it cannot be used, or another gateway uses it."""
        self._waiting = waiting_ends.WaitingEnds()
        self._path = journal
        self._journal: io.FileIO | None = None
        self._lines = 0
        self._next: _NextJournal | None = None
        self._next_at = 0
        """Lines of the journal from which the next one is written, later after a failure; 0 = twice as many as may wait."""
        self._dropped = 0
        """Ends that were dropped since none waited."""
        if journal is not None:
            self._journal = _opened(journal)
            content = self._journal.readall()
            if content and not content.endswith(b"\n"):
                self._journal.write(b"\n")  # a crash cut the last line; the next one must not follow it
            for workflow, call, ok in _ends(content):
                tenant = tenant_ids.tenant_part(workflow)
                self._waiting.add(waiting_ends.CallEnd(tenant=tenant, workflow=workflow, call=call, ok=ok))
                self._lines += 1
            if self._lines:
                logger.warning("%s: %d ends of calls of an earlier process wait for the store", journal, self._lines)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, end: waiting_ends.CallEnd) -> None:
        """One more end, which the journal has when this returns."""
        self._waiting.add(end)
        if len(self) > MOST:
            dropped = self._waiting.drop()
            self._dropped += 1
            if self._dropped % LOGGED_EVERY == 1:
                logger.error(
                    "the end of call %s of workflow %s cannot be recorded, because more than %d ends wait for the store; "
                    "so far %d are lost", dropped.call, dropped.workflow, MOST, self._dropped,
                )  # fmt: skip
        if self._journal is None or self._path is None:
            return
        try:
            _write(self._journal, _line(end))
            self._lines += 1
            if self._next is not None:
                self._copy(self._journal, self._next, end)
            elif self._lines >= max(2 * MOST, self._next_at):
                self._next_at = self._lines + MOST // 10
                self._next = _NextJournal(self._path, self._waiting)
        except OSError:
            logger.exception("the journal of the ends of calls cannot be written; a killed gateway would forget them")

    def _copy(self, journal: io.FileIO, following: "_NextJournal", end: waiting_ends.CallEnd) -> None:
        """Writes more of the next journal, which takes the place of the present one when it has all ends that wait."""
        self._next = None
        try:
            if not following.add(end):
                self._next = following
                return
            following.replace(journal)
        except OSError:
            following.abandon()
            raise
        self._journal, self._lines, self._next_at = following.journal, following.lines, 0

    async def deliver(self, record: Record) -> None:
        """Gives the ends that wait now to `record`, several at a time, until one is not recorded. An end is dropped when it
        is recorded."""
        left = len(self)

        async def give() -> None:
            nonlocal left
            while left > 0 and (end := self._waiting.take()) is not None:
                left -= 1
                recorded = False
                try:
                    recorded = await record(end)
                finally:
                    self._waiting.give_back(end, recorded=recorded)
                if not recorded:
                    left = 0

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(AT_ONCE, left)):
                tasks.create_task(give())
        if len(self):
            return
        self._dropped = 0
        if self._lines:
            try:
                self._empty()
            except OSError:
                logger.exception("the journal of the ends of calls cannot be emptied")

    def close(self) -> None:
        """Closes the journal, which keeps what still waits."""
        if self._next is not None:
            self._next.abandon()
        if self._journal is not None:
            self._journal.close()

    def _empty(self) -> None:
        """Nothing waits any more."""
        if self._next is not None:
            self._next.abandon()
            self._next = None
        if self._journal is not None:
            self._journal.truncate(0)
        self._lines = self._next_at = 0


class _NextJournal:
    """A journal with the ends that wait and without those that are recorded. A process that is killed before it takes the
    place of the old one leaves the old one, and one that is killed later leaves this one."""

    def __init__(self, path: pathlib.Path, waiting: Iterable[waiting_ends.CallEnd]) -> None:
        """Takes the place of the journal at `path` later. Raises `OSError`."""
        self._path = path
        self._own = path.with_name(path.name + ".new")
        self._own.unlink(missing_ok=True)
        self.journal = _opened(self._own)
        self.lines = 0
        self._left = collections.deque(waiting)

    def add(self, end: waiting_ends.CallEnd) -> bool:
        """One more end waits. Returns whether all that wait are written. Raises `OSError`."""
        self._left.append(end)
        count = min(COPIED_AT_ONCE, len(self._left))
        _write(self.journal, b"".join(_line(self._left.popleft()) for _ in range(count)))
        self.lines += count
        return not self._left

    def replace(self, old: io.FileIO) -> None:
        """Takes the place of the old journal. Raises `OSError`."""
        self._own.replace(self._path)
        old.close()

    def abandon(self) -> None:
        """The old journal stays."""
        self.journal.close()
        with contextlib.suppress(OSError):
            self._own.unlink(missing_ok=True)


def _write(journal: io.FileIO, lines: bytes) -> None:
    if journal.write(lines) != len(lines):
        journal.write(b"\n")
        raise OSError(errno.ENOSPC, "the disk is full")


def _opened(path: pathlib.Path) -> io.FileIO:
    """The journal, locked. Its writes go to its end, and are not buffered in this process."""
    while True:
        journal = io.FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(journal.fileno())):
                return journal  # or another gateway has replaced it just now
        except OSError as error:
            journal.close()
            raise OSError(
                f"store.journal: {path} is used by another gateway; give each gateway a file of its own"
            ) from error
        journal.close()


def _line(end: waiting_ends.CallEnd) -> bytes:
    return orjson.dumps([end.workflow, end.call, end.ok], option=orjson.OPT_APPEND_NEWLINE)


def _ends(content: bytes) -> Iterator[tuple[str, str, bool]]:
    """The ends in a journal. A line that a crash cut is left out."""
    for line in content.splitlines()[-3 * MOST :]:  # more than there are, unless no next journal could be written
        with contextlib.suppress(ValueError):
            match orjson.loads(line):
                case [str(workflow), str(call), bool(ok)]:
                    yield workflow, call, ok
