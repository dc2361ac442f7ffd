"""What a new client waits while others send their first bytes one at a time on many connections, as fast as they can."""

import asyncio
import contextlib
import pathlib
import ssl
import sys
import time
from typing import Any

import affordable_files
import aiohttp
import pytest
import test_port_encryption

import fake_engine

pytestmark = pytest.mark.faults

CONNECTIONS = 1500
SECONDS = 6

DRIP = """
import socket, sys
port, count, first, rest = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])

def opened():
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    return client

clients = [[opened(), -1] for _ in range(count)]
while True:
    for each in clients:
        client, at = each
        try:
            client.send(first if at < 0 else rest[at : at + 1])
            each[1] += 1
        except BlockingIOError:
            continue
        except OSError:
            each[1] = len(rest)
        if each[1] >= len(rest):
            client.close()
            each[:] = [opened(), -1]
"""
"""Sends `first` on each connection, and then the other bytes one at a time, on all connections in turn."""

HELLO = b"\x01\x00\x3f\xf0\x03\x03" + bytes(300)
FIRST_MESSAGE = b"".join(b"\x16\x03\x01\x00\x01" + HELLO[at : at + 1] for at in range(62)) + b"\x16\x03\x01\x3f\xff"
"""Records of one byte each, and the beginning of one that is as long as a record may be."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nA: "


async def answered_s(url: str, context: ssl.SSLContext | None) -> list[float]:
    """The times in which clients with connections of their own get an answer, sorted."""
    times, ends_s = list[float](), time.monotonic() + SECONDS
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0), ssl=context or True)
        async with aiohttp.ClientSession(connector=connector) as http, http.get(f"{url}/v1/models") as answer:
            assert answer.status == 200
            await answer.read()
        times.append(time.monotonic() - began_s)
        await asyncio.sleep(0.02)
    return sorted(times)


@pytest.mark.parametrize(
    ("kind", "first", "rest"),
    [
        ("the first message of TLS", FIRST_MESSAGE, bytes(15_000)),
        ("the head of a request", HEAD, b"a" * 3000),
    ],
)
async def test_clients_that_send_one_byte_at_a_time_keep_no_new_client_waiting(
    rig: Any, figure: Any, tmp_path: pathlib.Path, kind: str, first: bytes, rest: bytes
) -> None:
    tls = test_port_encryption.certificate(tmp_path, rsa_bits=2048) if "TLS" in kind else None
    async with fake_engine.engine() as engine:
        gateway = await rig.gateway([engine], None, **({"tls": tls} if tls else {}))
        count = affordable_files.affordable(CONNECTIONS, 1)
        words = [gateway.url.rpartition(":")[2], str(count), first.hex(), rest.hex()]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIP, *words)
        try:
            await asyncio.sleep(1)
            times = await answered_s(gateway.url, test_port_encryption.trusting(tls) if tls else None)
            assert process.returncode is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    for part, found_s, goal_ms in (("p50", times[len(times) // 2], 150), ("max", times[-1], 500)):
        figure(f"{count} clients send {kind} by the byte: answer {part} of new clients, ms", f"{1000 * found_s:.0f}",
               goal=f"below {goal_ms}", met=1000 * found_s < goal_ms)  # fmt: skip
    assert times[len(times) // 2] < 1
