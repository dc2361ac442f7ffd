"""What a new client waits while others send small calls as fast as one process can, and what the calls leave."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc_peer
import hpack
import pytest
import test_new_connections

import fake_engine
from tidegate_cli.processes import free_port
from tidegate_gateway.edge import http2_frames
from tidegate_proto.v1 import inference_pb2

pytestmark = pytest.mark.faults

CONNECTIONS, AT_ONCE = 100, 400
FLOOD = """
import socket, sys, threading, time
port, connections, opens, blocks = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4].split(",")
frames = [(bytes.fromhex(block[:8]), bytes.fromhex(block[8:])) for block in blocks]

def read(client, ended):
    try:
        while client.recv(262144):
            pass
    except OSError:
        pass
    ended.append(1)

def send():
    while True:
        try:
            client, ended, number = socket.create_connection(("127.0.0.1", port)), [], 1
            threading.Thread(target=read, args=(client, ended), daemon=True).start()
            client.sendall(opens)
            while not ended:
                sent = b""
                for each in range(number, number + 800, 2):
                    for head, payload in frames:
                        sent += len(payload).to_bytes(3) + head[:2] + each.to_bytes(4) + payload
                client.sendall(sent)
                number += 800
            client.close()
        except OSError:
            time.sleep(0.01)

for _ in range(connections):
    threading.Thread(target=send, daemon=True).start()
time.sleep(60)
"""
"""A client that sends the frames of 400 streams at a time on each of its connections, and reads the answers."""


def frames(path: str, message: bytes, *, resets: bool) -> str:
    """The frames of one stream: type and flags, two bytes that stand for nothing, and the payload."""
    head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
    head += [("content-type", "application/grpc"), ("x-tidegate-tenant", "hasty")]
    block = b"".join(  # literals that the gateway does not memorize
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in head
    )
    assert hpack.Decoder().decode(block) == head
    parts = [
        (http2_frames.HEADERS, http2_frames.END_HEADERS, block),
        (http2_frames.DATA, http2_frames.END_STREAM, grpc_peer.message(message)),
    ]
    if resets:
        parts.append((http2_frames.RST_STREAM, 0, bytes(4)))
    return ",".join((bytes([kind, flags, 0, 0]) + payload).hex() for kind, flags, payload in parts)


CALL = inference_pb2.GenerateRequest(model="m", prompt="a", max_tokens=1).SerializeToString()
FLOODS = {
    "checks of the health": frames(grpc_peer.CHECK, b"", resets=False),
    "watches of the health": frames(grpc_peer.WATCH, b"", resets=False),
    "calls that are reset": frames(grpc_peer.GENERATE, CALL, resets=True),
    "lists of workflows": frames("/tidegate.v1.Workflows/List", b"", resets=False),
}


PIPELINES = """
import random, socket, struct, sys, threading, time
port, connections, whole = int(sys.argv[1]), int(sys.argv[2]), 40 * b"GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"

def send():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(whole)
                time.sleep(random.choice((0, 0, 0.002, 0.02, 0.2)))
        except OSError:
            time.sleep(0.01)

for _ in range(connections):
    threading.Thread(target=send, daemon=True).start()
time.sleep(60)
"""
"""A client without a key that sends 40 requests at a time on each of its connections, and resets them."""


@pytest.mark.parametrize("kind", FLOODS)
async def test_small_calls_over_grpc_keep_no_new_client_waiting(rig: Any, figure: Any, kind: str) -> None:
    async with fake_engine.engine() as engine:
        grpc_port = free_port()
        gateway = await rig.gateway([engine], None, grpc_port=grpc_port)
        opens = http2_frames.PREFACE + http2_frames.frame(http2_frames.SETTINGS, 0, 0, b"")
        words = [str(grpc_port), str(CONNECTIONS), opens.hex(), FLOODS[kind]]
        name = f"small calls over gRPC ({kind}), {CONNECTIONS} connections with {AT_ONCE} at a time"
        port = int(gateway.url.rpartition(":")[2])
        ask = test_new_connections.ask_http
        await test_new_connections.delays(gateway, figure, FLOOD, words, ask, port, name)


async def ask_health(port: int) -> None:
    """A probe on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=test_new_connections.ADDRESS)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize("ask", [ask_health, test_new_connections.ask_http], ids=["a probe", "a call"])
async def test_pipelined_requests_that_are_reset_keep_no_new_client_waiting(
    rig: Any, figure: Any, ask: Callable[[int], Awaitable[None]]
) -> None:
    async with fake_engine.engine() as engine:
        gateway = await rig.gateway([engine], None)
        words = [gateway.url.rpartition(":")[2], "300"]
        name = f"300 connections with 40 requests at a time that are reset ({ask.__name__})"
        # A connection with sixteen requests that wait has 45 KiB, and the gateway notices after 2 s that it is reset.
        await test_new_connections.delays(
            gateway, figure, PIPELINES, words, ask, int(words[0]), name, p50_ms=150, most_mib=250
        )
