"""What a new client waits while others open connections and reset or end them as fast as one process can."""

import asyncio
import contextlib
import sys
import time
from typing import Any

import aiohttp
import pytest

from tidegate_gateway import fake_engine

pytestmark = pytest.mark.faults

FLOOD = """
import collections, socket, struct, sys, time
port, kind, delay_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
body = b'{"model": "m", "prompt": "a", "max_tokens": 1000, "stream": true}'
head = b"POST /v1/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"
sent = {"half a request": head % 1000 + b"{", "a call": head % len(body) + body}.get(kind)
opened, ended = collections.deque(), time.monotonic() + 60
while time.monotonic() < ended:
    while opened and opened[0][0] <= time.monotonic():
        client = opened.popleft()[1]
        if kind != "ended":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    if len(opened) < 900:
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        if sent:
            try:
                client.send(sent)
            except OSError:
                pass
        opened.append((time.monotonic() + delay_s, client))
"""
"""A client that opens connections and ends each one after a while."""


HONEST = {"x-tidegate-tenant": "honest"}
"""The clients that connect and end are of another tenant."""


async def answered_s(url: str, seconds: float) -> list[float]:
    """The times in which clients with a connection of their own get an answer, sorted."""
    times, ends_s = list[float](), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        async with aiohttp.ClientSession() as http, http.get(url + "/v1/models", headers=HONEST) as answer:
            assert answer.status == 200
            await answer.read()
        times.append(time.monotonic() - began_s)
        await asyncio.sleep(0.02)
    return sorted(times)


@pytest.mark.parametrize(
    ("kind", "delay_ms"), [("reset", 0), ("ended", 0), ("half a request", 0), ("half a request", 20), ("a call", 20)]
)
async def test_connections_that_are_reset_keep_no_new_client_waiting(
    rig: Any, figure: Any, kind: str, delay_ms: int
) -> None:
    async with fake_engine.engine() as engine:
        gateway = await rig.gateway([engine], None)
        port = gateway.url.rpartition(":")[2]
        flood = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, port, kind, str(delay_ms / 1000))
        try:
            await asyncio.sleep(1)
            before = gateway.memory
            times = await answered_s(gateway.url, 6)
            grown = (gateway.memory - before) / 2**20
            assert flood.returncode is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                flood.kill()
            await flood.wait()
    name = f"connections that end after {delay_ms} ms ({kind})"
    for part, found_s, goal_ms in (("p50", times[len(times) // 2], 100), ("max", times[-1], 500)):
        figure(f"{name}: answer {part} of new clients, ms", f"{1000 * found_s:.0f}", goal=f"below {goal_ms}",
               met=1000 * found_s < goal_ms)  # fmt: skip
    figure(f"{name}: memory after 6 s more, MiB", f"{grown:.0f}", goal="below 50", met=grown < 50)
    assert times[len(times) // 2] < 1
