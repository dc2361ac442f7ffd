"""A port accepts a burst of connections in few steps of the event loop, and loses none when it closes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from tidegate_gateway.edge import listening_port

BURST = 320


class Accepted(asyncio.Protocol):
    """Counts the connections that were made and are not lost."""

    def __init__(self, seen: set[asyncio.BaseTransport]) -> None:
        self._seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._seen.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._seen.discard(self.transport)


def connected(stack: contextlib.ExitStack, port: int, count: int) -> None:
    """Clients that connect without a step of the event loop."""
    for _ in range(count):
        client = stack.enter_context(socket.socket())
        client.connect(("127.0.0.1", port))


async def a_burst(seen: set[asyncio.BaseTransport]) -> int:
    """The steps that pass until all clients of a burst are accepted."""
    opened = await listening_port.open_port(lambda: Accepted(seen), "127.0.0.1", 0)
    steps = 0
    with contextlib.ExitStack() as stack:
        connected(stack, opened.port, BURST)
        while len(seen) < BURST:
            steps += 1
            await asyncio.sleep(0)
    await opened.close()
    return steps


async def closing(seen: set[asyncio.BaseTransport]) -> int:
    """The clients that were accepted of those that connected just before the port closed."""
    opened = await listening_port.open_port(lambda: Accepted(seen), "127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        connected(stack, opened.port, BURST)
        await opened.close()
        accepted = len(seen)
        with pytest.raises(ConnectionRefusedError):
            connected(stack, opened.port, 1)
    return accepted


Case = Callable[[set[asyncio.BaseTransport]], Coroutine[None, None, int]]
Run = Callable[[Coroutine[None, None, int]], int]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_burst_of_connections_is_accepted_in_few_steps(run: Run) -> None:
    steps = run(a_burst(set()))
    print(f"{BURST} connections took {steps} steps of the event loop; the goal is {BURST // 8}")
    assert steps <= BURST // 8


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_clients_that_have_connected_when_a_port_closes_are_accepted(run: Run) -> None:
    assert run(closing(set())) == BURST
