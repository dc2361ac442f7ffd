"""The process supervisor of `tidegate up`: each child process has a log file, is watched, and is stopped in reverse order.

Each run begins a new log and keeps the previous one as `name.log.1`; a restarted child appends to its log. The kernel
ends a child when its parent dies, so even SIGKILL of the parent leaves no child behind.
"""

import asyncio
import collections
import contextlib
import errno
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
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
"""Each child runs this program before it becomes its command. A function between fork and exec is not possible, because the
parent runs gRPC's threads."""


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
    """Environment variables in addition to those of this process."""

    def end(self) -> str:
        """A description of how the process ended."""
        code = self.process.returncode
        if code is None:
            return "is running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}; its log is {self.log}"

    def last_words(self) -> str:
        """The end of the log."""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").strip()


class Family:
    """All child processes. `stop` leaves none behind."""

    def __init__(self, logs: pathlib.Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    @property
    def names(self) -> list[str]:
        """In the order of their start; `stop` ends them in the reverse order."""
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
        """Starts an ended child again with the same command, at the same position in the order of stopping."""
        _kill_group(dead)
        child = await _started(dead.name, dead.command, dead.log, dead.stop_s, dead.environment)
        self._children[self._children.index(dead)] = child
        return child

    async def first_crash(self) -> Child:
        """Waits until a child has ended without being stopped, and returns it."""
        waits = {asyncio.ensure_future(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Ends all children, the last started first."""
        while self._children:
            await _end(self._children[-1])
            self._children.pop()

    def kill(self) -> None:
        """Kills all children and their descendants at once; `stop` then returns without waiting."""
        for child in self._children:
            _kill_group(child)


async def wait_until(child: Child, ready: Callable[[], Awaitable[bool]], *, patience_s: float) -> None:
    """Polls `ready` until it is true. Raises `Failed` when the child ends first or `patience_s` has passed."""
    try:
        async with asyncio.timeout(patience_s):
            while not await ready():
                if child.process.returncode is not None:
                    raise Failed(f"{child.name} ended at start:\n{child.last_words() or _silent_end(child)}")
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Failed(f"{child.name} is not ready after {patience_s:.0f} s; its log is {child.log}") from None


def _silent_end(child: Child) -> str:
    """What is known of a child that ended and wrote nothing; a full disk keeps it from writing."""
    folder = child.log.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TAIL_BYTES))
            file.flush()
    except OSError as error:
        return f"nothing can be written in {folder}: {error.strerror}"
    return f"it {child.end()}, which is empty"


class InUse(Failed):
    """A port cannot be used, and another one may be."""


_claims: collections.deque[int] = collections.deque()
"""Descriptors of sockets, open until the process ends, whose names tell which ports this process has given out of late."""
_MOST_CLAIMS = 64


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections, so it stays free until a process takes it. On Linux
    no process, this one included, gets a port that was given out a moment ago."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _claim(port)
            return port


def _claim(port: int) -> None:
    """Raises `OSError` if the port has been given out."""
    if sys.platform != "linux":
        return
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0tidegate-port-{port}")  # an abstract name: it leaves no file, and goes with the socket
    except OSError:
        claim.close()
        raise
    _claims.append(claim.detach())
    if len(_claims) > _MOST_CLAIMS:
        os.close(_claims.popleft())


def check_free(host: str, port: int, option: str) -> None:
    """Raises `Usage` for a number that is no port, and `Failed` with one sentence when `port` is in use."""
    if not 1 <= port <= 65535:
        raise Usage(f"{option} {port} is not a port; choose one from 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
                raise InUse(
                    f"port {port} on {host} cannot be used ({error.strerror}); choose another by {option}"
                ) from None
            raise Failed(f"{host} is no address of this machine ({error.strerror}); choose another by --host") from None


def check_all_free(host: str, ports: Mapping[str, int]) -> None:
    """As `check_free` for all options at once; several ports in use give one sentence."""
    failures: dict[str, Failed] = {}
    for option, port in ports.items():
        try:
            check_free(host, port, option)
        except InUse as error:
            failures[option] = error
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        *first, last = (f"{ports[option]} ({option})" for option in failures)
        raise Failed(
            f"the ports {', '.join(first)} and {last} on {host} are in use, perhaps by another `tidegate up`; stop it, or"
            f" choose others by {', '.join(failures)}, and another folder by --state"
        )


def ourselves(*words: str) -> list[str]:
    """The command line of another `tidegate` command in the same Python environment."""
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
    """Kills the rest of a child's process group: vLLM's worker processes outlive the process that started them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
