"""A simulated engine as a process, for commands that talk to an engine."""

import asyncio
import contextlib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tidegate_cli import processes

READY_S, STOP_S = 120, 60


@pytest.fixture(scope="session")
def sim_engine() -> Callable[..., AbstractContextManager[str]]:
    """`with sim_engine("--speed", "20") as url`: the engine serves at `url` and has ended cleanly afterwards."""
    return _served


@contextlib.contextmanager
def _served(*words: str) -> Iterator[str]:
    port, control = processes.free_port(), processes.free_port()
    command = processes.ourselves("sim-engine", "--port", str(port), "--control", f"127.0.0.1:{control}", *words)
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"

    async def ready() -> None:
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/health").close())
                    return
                except urllib.error.URLError:
                    await asyncio.sleep(0.05)

    asyncio.run(ready())
    yield url
    process.terminate()
    assert process.wait(STOP_S) == 0
