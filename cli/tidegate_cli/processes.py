"""The child processes of `tidegate up`: started with a log file each, watched, and stopped in reverse order.

A child is told by the kernel to end when its parent dies, so not even SIGKILL leaves one behind.
"""

import asyncio
import contextlib
import ctypes
import pathlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tidegate_cli.errors import Failed, Usage

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 2000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A running child."""

    name: str
    command: Sequence[str]
    process: asyncio.subprocess.Process
    log: pathlib.Path
    stop_s: float
    """Seconds between SIGTERM and SIGKILL."""

    def end(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode
        if code is None:
            return "runs"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}; its log is {self.log}"

    def last_words(self) -> str:
        """The end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").strip()


class Family:
    """All children; leaves none behind."""

    def __init__(self, logs: pathlib.Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    async def start(self, name: str, command: Sequence[str], *, stop_s: float = 10.0) -> Child:
        """Starts `command` with its output in `logs/name.log`."""
        path = self._logs / f"{name}.log"
        with _opened(path) as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )
        child = Child(name=name, command=command, process=process, log=path, stop_s=stop_s)
        self._children.append(child)
        return child

    async def restart(self, dead: Child) -> Child:
        """Starts a child that has ended once more, as it was."""
        self._children.remove(dead)
        return await self.start(dead.name, dead.command, stop_s=dead.stop_s)

    async def first_death(self) -> Child:
        """Waits until some child has ended by itself."""
        waits = {asyncio.ensure_future(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Ends all of them, last started first."""
        while self._children:
            child = self._children.pop()
            await _end(child)


async def wait_until(child: Child, ready: Callable[[], Awaitable[bool]], *, patience_s: float) -> None:
    """Polls `ready` until it holds. Raises `Failed` when the child ends or the patience does."""
    try:
        async with asyncio.timeout(patience_s):
            while not await ready():
                if child.process.returncode is not None:
                    raise Failed(f"{child.name} ended at start:\n{child.last_words()}")
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Failed(f"{child.name} is not ready after {patience_s:.0f} s; its log is {child.log}") from None


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(host: str, port: int, option: str) -> None:
    """Raises `Failed` with one sentence when `port` is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            raise Usage(f"{option} {port} is not a port; choose one from 1 to 65535") from None
        except OSError as error:
            raise Failed(
                f"port {port} on {host} cannot be used ({error.strerror}); choose another by {option}"
            ) from None


def ourselves(*words: str) -> list[str]:
    """The command line of another `tidegate` command in this environment."""
    return [sys.executable, "-m", "tidegate_cli.main", *words]


def _opened(path: pathlib.Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise Failed(f"cannot write the log {path}: {error.strerror}") from None


async def _end(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.terminate()
    try:
        async with asyncio.timeout(child.stop_s):
            await child.process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
