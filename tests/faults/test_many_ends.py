"""What others feel when thousands of calls end at the same instant: their clients hang up, their time is over, or their
workflow is cancelled."""

import asyncio
import contextlib
import pathlib
import socket
import struct
import sys
from typing import Any

import answer_probe
import orjson
import pytest

import fake_engine

pytestmark = pytest.mark.faults

HELD = 4000
TOGETHER = 50
SECONDS = 8
DELETE = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method='DELETE'))"
"""A client of its own, whose work is none of the probe's."""
RESET = struct.pack("ii", 1, 0)


def request(head: str) -> bytes:
    body = orjson.dumps({"model": "fake", "prompt": "x", "max_tokens": 10})
    return f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def held(port: int, sent: bytes) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, sent)
    return client


@pytest.mark.parametrize("kind", ["hang up", "deadline", "cancelled workflow"])
async def test_calls_that_end_together_stop_nobody(
    rig: Any, until: Any, figure: Any, free_port: Any, tmp_path: pathlib.Path, kind: str
) -> None:
    store = await rig.valkey(port=free_port(), folder=tmp_path / "store")
    async with fake_engine.engine(tokens=1, first_s=3600) as engine:
        gateway = await rig.gateway(
            [engine], store.url,
            dispatch={"cap": 1}, queue={"maxRequests": 2 * HELD, "ttl": "1h"}, timeouts={"drain": "1s"},
            limits={"connections": 3 * HELD, "idle": "1h"},
        )  # fmt: skip
        port, loop = int(gateway.url.rpartition(":")[2]), asyncio.get_running_loop()
        head = "x-tidegate-workflow: many\r\nx-tidegate-stage: one\r\n" if kind == "cancelled workflow" else ""
        ends_at_s = loop.time() + 60
        if kind == "cancelled workflow":
            made = {"id": "many", "deadline_ms": 3_600_000}
            async with rig.http.post(gateway.url + "/v1/workflows", json=made) as answer:
                assert answer.status == 201, await answer.text()

        async def waiting() -> float:
            return float(rig.value(await rig.metrics(gateway), "tidegate_queue_depth"))

        async def one() -> socket.socket:
            left_ms = int(1000 * (ends_at_s - loop.time()))
            return await held(port, request(f"x-tidegate-deadline-ms: {left_ms}\r\n" if kind == "deadline" else head))

        with contextlib.ExitStack() as stack:
            stack.enter_context(await held(port, request("")))
            await until(lambda: engine.running == 1)
            sockets = []
            for _ in range(0, HELD, TOGETHER):
                sockets += [
                    stack.enter_context(made) for made in await asyncio.gather(*(one() for _ in range(TOGETHER)))
                ]

            async def all_wait() -> bool:
                return await waiting() == HELD

            async def none_waits() -> bool:
                return await waiting() == 0

            await until(all_wait, 50)
            probes = tmp_path / "probes"
            async with answer_probe.probed(gateway.url, probes):
                await asyncio.sleep(1)
                match kind:
                    case "hang up":
                        began_s = loop.time()
                        for client in sockets:
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                            client.close()
                    case "deadline":
                        await asyncio.sleep(ends_at_s - loop.time() - 0.5)
                        began_s = loop.time()
                    case _:
                        began_s = loop.time()
                        deleting = await asyncio.create_subprocess_exec(
                            sys.executable, "-c", DELETE, gateway.url + "/v1/workflows/many"
                        )
                        assert await deleting.wait() == 0
                await asyncio.sleep(SECONDS)
                await until(none_waits, 60)
            longest_s = answer_probe.longest_s(probes, began_s, loop.time())
    figure(f"{HELD} waiting calls end at once ({kind}): longest answer of /health, ms", f"{1000 * longest_s:.0f}",
           goal="below 500", met=longest_s < 0.5)  # fmt: skip
    assert longest_s < 2
