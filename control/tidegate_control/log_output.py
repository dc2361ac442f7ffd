"""The log on its way to stderr. A program that does not read it stops no call.

A line is written at once while the pipe has room for it. When the pipe is full, a thread waits for the reader, and the
lines that follow wait behind it within a bound; lines beyond the bound are dropped and counted. So a busy process has no
further thread, and a write never blocks the event loop.
"""

import collections
import logging
import os
import select
import threading

AT_ONCE_BYTES = 4096
"""A pipe that says it can be written to takes so much (PIPE_BUF of Linux)."""
MOST_HELD_BYTES = 1024 * 1024
LAST_WORDS_S = 1.0
"""For the held lines to be read when the process ends."""


class LogOutput(logging.Handler):
    """Writes records to a file descriptor."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._hold_lock = threading.Lock()
        """Of all that follows: the lock of the handler is taken while the process waits for the last lines."""
        self._held: collections.deque[bytes] = collections.deque()
        self._held_bytes = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None
        """Writes the held lines, while there are some."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the lock of the handler."""
        at, line = 0, b""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            while self._thread is None and at < len(line) and self._poll.poll(0):
                at += os.write(self._descriptor, line[at : at + AT_ONCE_BYTES])
        except OSError:  # nobody is left to read it
            return
        except (ValueError, TypeError):  # a message that does not fit its values
            self.handleError(record)
            return
        if at < len(line):
            self._hold(line[at:])

    def close(self) -> None:
        """Gives the held lines a moment."""
        if (thread := self._thread) is not None:
            thread.join(LAST_WORDS_S)
        super().close()

    def _hold(self, line: bytes) -> None:
        with self._hold_lock:
            if self._held_bytes + len(line) > MOST_HELD_BYTES:
                self._dropped += 1
                return
            self._held.append(line)
            self._held_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_held, name="log", daemon=True)
                self._thread.start()

    def _write_held(self) -> None:
        while (line := self._next()) is not None:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                continue

    def _next(self) -> bytes | None:
        """The next line for the thread, whose last act this is if there is none."""
        with self._hold_lock:
            if self._held:
                line = self._held.popleft()
                self._held_bytes -= len(line)
                return line
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                return b"%d lines of the log were dropped, because nothing read them\n" % dropped
            self._thread = None
            return None
