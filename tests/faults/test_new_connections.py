"""What a new client waits while others open connections and reset or end them as fast as one process can."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc_peer
import hpack
import pytest

import fake_engine
from tidegate_cli.processes import free_port
from tidegate_gateway.edge import http2_frames
from tidegate_proto.v1 import inference_pb2

pytestmark = pytest.mark.faults

FLOOD = """
import collections, random, socket, struct, sys, time
port, kind, delay_s, sent = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), bytes.fromhex(sys.argv[4])
opened, ended = collections.deque(), time.monotonic() + 60
while time.monotonic() < ended:
    while opened and opened[0][0] <= time.monotonic():
        client = opened.popleft()[1]
        if not kind.startswith("ended"):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    if len(opened) < 900:
        client = socket.socket()
        client.setblocking(False)
        if kind.endswith("many addresses"):
            client.bind((f"127.1.{random.randrange(256)}.{random.randrange(1, 255)}", 0))
        client.connect_ex(("127.0.0.1", port))
        if sent:
            try:
                client.send(sent)
            except OSError:
                pass
        opened.append((time.monotonic() + delay_s, client))
"""
"""A client that opens connections, sends something on each, and ends it after a while."""

BODY = b'{"model": "m", "prompt": "a", "max_tokens": 1000, "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def calls_over_grpc(count: int) -> bytes:
    """What a client sends that begins so many calls at once."""
    request = inference_pb2.GenerateRequest(model="m", prompt="a", max_tokens=1000).SerializeToString()
    head = [(":method", "POST"), (":scheme", "http"), (":path", grpc_peer.GENERATE), (":authority", "x")]
    block = hpack.Encoder().encode([*head, ("te", "trailers"), ("content-type", "application/grpc")], huffman=False)
    sent = http2_frames.PREFACE + http2_frames.frame(http2_frames.SETTINGS, 0, 0, b"")
    for number in range(1, 2 * count, 2):
        sent += http2_frames.frame(http2_frames.HEADERS, http2_frames.END_HEADERS, number, block)
        sent += http2_frames.frame(http2_frames.DATA, http2_frames.END_STREAM, number, grpc_peer.message(request))
    return sent


SENT = {
    "half a request": HEAD % 1000 + b"{",
    "a call": HEAD % len(BODY) + BODY,
    "100 calls over gRPC": calls_over_grpc(100),
    "ended after the first bytes of gRPC": calls_over_grpc(0),
    "ended after 16 wrong calls, from many addresses": 16 * (HEAD % 2 + b"{}"),
}


GOALS = {"ended after 16 wrong calls, from many addresses": {"p50_ms": 150, "most_mib": 250}}
"""Goals that are not those of the other kinds: they are those of other pipelined requests."""
HONEST, ADDRESS = {"x-tidegate-tenant": "honest"}, ("127.0.0.2", 0)
"""The clients that connect and end are of another tenant and another address."""


async def ask_http(port: int) -> None:
    """A client with a connection of its own gets an answer."""
    connector = aiohttp.TCPConnector(local_addr=ADDRESS)
    url = f"http://127.0.0.1:{port}/v1/models"
    async with aiohttp.ClientSession(connector=connector) as http, http.get(url, headers=HONEST) as answer:
        assert answer.status == 200
        await answer.read()


async def ask_grpc(port: int) -> None:
    """A client with a connection of its own gets the first frame of the gateway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=ADDRESS)
    writer.write(calls_over_grpc(0))
    await reader.readexactly(9)
    writer.close()


async def answered_s(ask: Callable[[int], Awaitable[None]], port: int, seconds: float) -> list[float]:
    """The times in which clients get an answer, sorted."""
    times, ends_s = list[float](), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        await ask(port)
        times.append(time.monotonic() - began_s)
        await asyncio.sleep(0.02)
    return sorted(times)


async def delays(
    gateway: Any, figure: Any, flood: str, words: list[str], ask: Callable[[int], Awaitable[None]], port: int, name: str,
    *, p50_ms: int = 100, most_mib: int = 50,
) -> None:  # fmt: skip
    """The times in which a new client gets an answer while the flood runs, and the memory that it takes."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", flood, *words)
    try:
        await asyncio.sleep(1)
        before = gateway.memory
        times = await answered_s(ask, port, 6)
        grown = (gateway.memory - before) / 2**20
        assert process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    for part, found_s, goal_ms in (("p50", times[len(times) // 2], p50_ms), ("max", times[-1], 500)):
        figure(f"{name}: answer {part} of new clients, ms", f"{1000 * found_s:.0f}", goal=f"below {goal_ms}",
               met=1000 * found_s < goal_ms)  # fmt: skip
    figure(f"{name}: memory after 6 s more, MiB", f"{grown:.0f}", goal=f"below {most_mib}", met=grown < most_mib)
    assert times[len(times) // 2] < 1


@pytest.mark.parametrize(
    ("kind", "delay_ms"),
    [
        ("reset", 0),
        ("ended", 0),
        ("half a request", 0),
        ("half a request", 20),
        ("half a request", 300),
        ("a call", 20),
        ("100 calls over gRPC", 20),
        ("ended after the first bytes of gRPC", 0),
        ("ended after 16 wrong calls, from many addresses", 20),
    ],
)
async def test_connections_that_are_reset_keep_no_new_client_waiting(
    rig: Any, figure: Any, kind: str, delay_ms: int
) -> None:
    async with fake_engine.engine() as engine:
        grpc_port = free_port()
        gateway = await rig.gateway([engine], None, grpc_port=grpc_port)
        port = grpc_port if "gRPC" in kind else int(gateway.url.rpartition(":")[2])
        words = [str(port), kind, str(delay_ms / 1000), SENT.get(kind, b"").hex()]
        name = f"connections that end after {delay_ms} ms ({kind})"
        ask = ask_grpc if "gRPC" in kind else ask_http
        await delays(gateway, figure, FLOOD, words, ask, port, name, **GOALS.get(kind, {}))
