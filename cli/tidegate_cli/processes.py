"""The child processes of `tidegate up`: started with a log file each, watched, and stopped in reverse order.

A log begins anew with each run and the one before is kept beside it (`name.log.1`); a child that is restarted goes on in
its own. A child is told by the kernel to end when its parent dies, so not even SIGKILL leaves one behind.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidegate_cli.command_errors import Failed, Usage

_TAIL_BYTES = 2000
_UNTIL_PARENT_DIES = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Run by each child before it becomes its command; not between fork and exec, which gRPC's threads here do not survive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A running child."""

    name: str
    command: Sequence[str]
    process: asyncio.subprocess.Process
    log: pathlib.Path
    stop_s: float
    """Seconds between SIGTERM and SIGKILL."""
    environment: Mapping[str, str]
    """Beside this process's own."""

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

    @property
    def names(self) -> list[str]:
        """In the order of their start; they are stopped in the reverse of it."""
        return [child.name for child in self._children]

    async def start(
        self, name: str, command: Sequence[str], *, stop_s: float = 10.0, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Starts `command` with its output in `logs/name.log`."""
        log = self._logs / f"{name}.log"
        with _failing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            if log.exists():
                log.replace(f"{log}.1")
        child = await _started(name, command, log, stop_s, environment or {})
        self._children.append(child)
        return child

    async def restart(self, dead: Child) -> Child:
        """Starts a child that has ended once more, as it was and in its place."""
        _kill_group(dead)
        child = await _started(dead.name, dead.command, dead.log, dead.stop_s, dead.environment)
        self._children[self._children.index(dead)] = child
        return child

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
            await _end(self._children[-1])
            self._children.pop()

    def kill(self) -> None:
        """Ends all of them, and what they have started, at once; `stop` then has nothing left to wait for."""
        for child in self._children:
            _kill_group(child)


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


async def _started(
    name: str, command: Sequence[str], log: pathlib.Path, stop_s: float, environment: Mapping[str, str]
) -> Child:
    with _failing(log):
        output = log.open("ab")
    with output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_DIES, str(os.getpid())),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    return Child(name=name, command=command, process=process, log=log, stop_s=stop_s, environment=environment)


@contextlib.contextmanager
def _failing(log: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failed(f"cannot write the log {log}: {error.strerror}") from None


async def _end(child: Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(child.stop_s):
            await child.process.wait()
    _kill_group(child)
    await child.process.wait()


def _kill_group(child: Child) -> None:
    """Ends what is left of a child and of all that it has started: vLLM's processes outlive the one that started them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
