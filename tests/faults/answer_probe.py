"""A client in a process of its own that asks a gateway for /health again and again and notes how long each answer took."""

import asyncio
import contextlib
import pathlib
import sys
from collections.abc import AsyncIterator

PROBE = """
import http.client, sys, time
probe = http.client.HTTPConnection(sys.argv[1])
while True:
    began_s = time.monotonic()
    probe.request("GET", "/health")
    probe.getresponse().read()
    print(began_s, time.monotonic() - began_s, flush=True)
    time.sleep(0.005)
"""


@contextlib.asynccontextmanager
async def probed(url: str, path: pathlib.Path) -> AsyncIterator[None]:
    """A process asks for /health again and again. Each line of the file has the instant and the seconds of an answer."""
    with path.open("wb") as out:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROBE, url.removeprefix("http://"), stdout=out
        )
        try:
            yield
        finally:
            child.kill()
            await child.wait()


def times_s(path: pathlib.Path) -> list[float]:
    """How long the answers took."""
    return [took_s for _, took_s in _answers(path)]


def longest_s(path: pathlib.Path, first_s: float, last_s: float) -> float:
    """The longest answer of those that began or ended between two instants."""
    return max(took_s for began_s, took_s in _answers(path) if began_s <= last_s and began_s + took_s >= first_s)


def _answers(path: pathlib.Path) -> list[tuple[float, float]]:
    """When each answer began, and how long it took."""
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(float(began_s), float(took_s)) for began_s, took_s in lines]
