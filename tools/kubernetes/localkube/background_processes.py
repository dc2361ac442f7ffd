"""Background processes that never outlive the one that started them.

Each runs under `setpriv --pdeathsig KILL`, so that even a SIGKILL of the tests takes it along. Output goes to a file
beside the others, whose tail is part of the error when a process ends early.
"""

import collections
import contextlib
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from tidegate_cli import processes

STOP_S = 2.0
"""Seconds between SIGTERM and SIGKILL: the API server takes much longer to stop politely, and nobody needs that."""


class EndedEarlyError(RuntimeError):
    """A process that should serve has ended, or did not become ready in time; the message holds the end of its
    output."""


class Processes:
    """Started in order, stopped in the opposite order."""

    def __init__(self, folder: pathlib.Path, *, enter: Sequence[str] = ()) -> None:
        """`folder` receives NAME.log of each; `enter` is put before each command (such as `nsenter --net=...`)."""
        self._folder = folder
        self._enter = list(enter)
        self._running: collections.OrderedDict[str, subprocess.Popen[bytes]] = collections.OrderedDict()
        self._started: dict[str, tuple[Sequence[str | pathlib.Path], Mapping[str, str] | None]] = {}
        """Command and environment of each process, for `restart`."""

    def start(self, name: str, command: Sequence[str | pathlib.Path], *, env: Mapping[str, str] | None = None) -> int:
        """Starts `command` and returns its process id."""
        self._started[name] = command, env
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self._enter, *map(str, command)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        return self._running[name].pid

    def wait(self, name: str, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Returns when `ready()` is true; raises EndedEarlyError when NAME ends first or the time is over."""
        until = time.monotonic() + timeout_s
        while not ready():
            if self._running[name].poll() is not None:
                raise EndedEarlyError(f"{name} ended with status {self._running[name].returncode}:\n{self.tail(name)}")
            if time.monotonic() > until:
                raise EndedEarlyError(f"{name} was not ready after {timeout_s:.0f} s:\n{self.tail(name)}")
            time.sleep(0.05)

    def tail(self, name: str, lines: int = 15) -> str:
        return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    def kill(self, name: str) -> None:
        """Ends one as if the power had gone."""
        process = self._running.pop(name)
        _signal(process, signal.SIGKILL)
        process.wait()

    def restart(self, name: str) -> None:
        """Starts one that was killed, with the same command."""
        command, env = self._started[name]
        self.start(name, command, env=env)

    def pause(self, name: str) -> None:
        """Lets one hang: its connections stay open, and nothing answers."""
        _signal(self._running[name], signal.SIGSTOP)

    def resume(self, name: str) -> None:
        _signal(self._running[name], signal.SIGCONT)

    def is_running(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def ended(self) -> list[str]:
        """Names of those that have ended by themselves."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def stop(self, *names: str) -> None:
        """Ends the named processes, all when none is named, the last started first."""
        ending = [self._running.pop(name) for name in reversed(names or tuple(self._running)) if name in self._running]
        for process in ending:
            _signal(process, signal.SIGTERM)
            _signal(process, signal.SIGCONT)
        until = time.monotonic() + STOP_S
        for process in ending:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now, and stay free until a process takes them."""
    return [processes.free_port() for _ in range(count)]
