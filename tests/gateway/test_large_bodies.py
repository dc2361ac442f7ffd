"""Large bodies are read in turns, and their memory is free once their request has ended."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from typing import Any

import event_loop_turns
import pytest

import fake_engine
from tidegate_gateway import reading_turns
from tidegate_gateway.edge import http_connection, http_messages, incoming_bytes

CLIENTS, BYTES = 30, 1024 * 1024
BEGIN = 2 * incoming_bytes.LARGE_BYTES
RECEIVED_BYTES = 256 * 1024
"""What a transport reads at once, at most."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % BYTES


@contextlib.asynccontextmanager
async def uploading(url: str, clients: int) -> Any:
    """Connections that have sent the beginning of a large body."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(clients):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            await loop.sock_connect(one, (host, int(port)))
            await loop.sock_sendall(one, HEAD + b" " * BEGIN)
            sockets.append(one)
        yield sockets


class Turns(event_loop_turns.Turns):
    """Bytes that all connections receive in each turn of the event loop."""

    @property
    def bytes(self) -> int:
        return sum(self.counts.values())

    def are_small(self) -> bool:
        """A turn of the counter may see the end of one turn of the loop and the beginning of the next one. Whoever has
        sent nothing for a while is read once before it joins the line."""
        few = 2 * reading_turns.AT_ONCE * RECEIVED_BYTES
        return sum(max(0, size - few) for size in self.counts.values()) <= CLIENTS * RECEIVED_BYTES


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    counted = Turns()
    receive = http_connection.Connection.data_received

    def received(self: http_connection.Connection, data: bytes) -> None:
        counted.add(len(data))
        receive(self, data)

    monkeypatch.setattr(http_connection.Connection, "data_received", received)
    async with event_loop_turns.running(counted):
        yield counted


async def test_one_turn_of_the_event_loop_reads_few_of_the_bytes_of_many_clients(
    up: Any, until: Any, turns: Turns
) -> None:
    loop = asyncio.get_running_loop()
    async with (
        fake_engine.engine() as engine,
        up(engine, store=False) as client,
        uploading(client.url, CLIENTS) as sockets,
    ):
        await until(lambda: turns.bytes == CLIENTS * (len(HEAD) + BEGIN))
        turns.counts.clear()
        rest = b" " * (BYTES - BEGIN)
        await asyncio.gather(*(loop.sock_sendall(one, rest) for one in sockets))
        await until(lambda: turns.bytes == CLIENTS * len(rest))
        for one in sockets:
            assert b"400" in await loop.sock_recv(one, 100), "spaces are no JSON"
    assert turns.are_small()


async def test_the_rest_of_a_rejected_body_is_read_in_turns_too(up: Any, until: Any, turns: Turns) -> None:
    """A client sees the error although it sends on."""
    async with (
        fake_engine.engine() as engine,
        up(engine, store=False, limits={"bodiesBytes": BYTES}) as client,
        uploading(client.url, CLIENTS) as sockets,
    ):
        loop = asyncio.get_running_loop()
        turns.counts.clear()
        sending = [asyncio.ensure_future(loop.sock_sendall(one, b" " * (BYTES - BEGIN))) for one in sockets]
        answers = await asyncio.gather(*(loop.sock_recv(one, 12) for one in sockets))
        await asyncio.gather(*sending, return_exceptions=True)
        assert turns.bytes > CLIENTS * BYTES // 4, "most clients send on after their answer"
    assert set(answers) <= {b"HTTP/1.1 429", b"HTTP/1.1 400"}
    assert answers.count(b"HTTP/1.1 429") > 0
    assert turns.are_small()


async def test_clients_that_hang_up_leave_no_bodies_behind(up: Any, until: Any) -> None:
    """Not even until the garbage collector looks."""
    body = b'{"model":"fake","prompt":"x","user":"%s"}' % (b"x" * (BYTES - 1000))

    def bodies() -> int:
        requests = (one for one in gc.get_objects() if type(one) is http_messages.Request)
        return sum(len(request.body) for request in requests)

    async with fake_engine.engine(first_s=3600) as engine, up(engine, store=False) as client:
        gc.disable()
        try:
            async with uploading(client.url, 4) as sockets:
                loop = asyncio.get_running_loop()
                for one in sockets[:2]:  # the others hang up in mid-body
                    await loop.sock_sendall(one, b" " * (BYTES - BEGIN))
                    await loop.sock_recv(one, 100)
                    await loop.sock_sendall(one, HEAD.replace(b"%d" % BYTES, b"%d" % len(body)) + body)
            await until(lambda: not client.gateway.placements.begun)
            await until(lambda: bodies() == 0)
        finally:
            gc.enable()
