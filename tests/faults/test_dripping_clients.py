"""What a new client waits while others send their first bytes one at a time on many connections, as fast as they can."""

import pathlib
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import affordable_files
import aiohttp
import pytest
import test_new_connections
import test_port_encryption

import fake_engine

pytestmark = pytest.mark.faults

CONNECTIONS = 1500

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


def over_tls(context: ssl.SSLContext) -> Callable[[int], Awaitable[None]]:
    """As `test_new_connections.ask_http`, over TLS."""

    async def ask(port: int) -> None:
        connector = aiohttp.TCPConnector(local_addr=test_new_connections.ADDRESS, ssl=context)
        url = f"https://127.0.0.1:{port}/v1/models"
        async with aiohttp.ClientSession(connector=connector) as http, http.get(url) as answer:
            assert answer.status == 200
            await answer.read()

    return ask


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
        port = int(gateway.url.rpartition(":")[2])
        words = [str(port), str(count), first.hex(), rest.hex()]
        ask = over_tls(test_port_encryption.trusting(tls)) if tls else test_new_connections.ask_http
        name = f"{count} clients send {kind} by the byte"
        await test_new_connections.delays(gateway, figure, DRIP, words, ask, port, name, p50_ms=150)
