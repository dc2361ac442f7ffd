"""A port accepts a burst of connections in few steps of the event loop, drops clients that are gone, and loses none of
the others when it closes."""

import asyncio
import contextlib
import socket
import struct
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


def connected(stack: contextlib.ExitStack, port: int, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Clients that connect without a step of the event loop."""
    clients = [stack.enter_context(socket.socket()) for _ in range(count)]
    for client in clients:
        client.bind((source, 0))
        client.connect(("127.0.0.1", port))
    return clients


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


def gone(port: int, count: int, *, reset: bool, sent: bytes = b"") -> None:
    """Clients that connect and reset the connection after half a request, or end it after some bytes."""
    for _ in range(count):
        with socket.socket() as client:
            client.connect(("127.0.0.1", port))
            client.send(b"POST / HTTP/1.1\r\n" if reset else sent)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def behind_clients_that_are_gone(reset: bool) -> int:
    """The protocols that are made before the one of a client that has sent its bytes and shut its side."""
    made = list[object]()
    received = asyncio.Event()

    class Received(asyncio.Protocol):
        def __init__(self) -> None:
            made.append(self)

        def data_received(self, data: bytes) -> None:
            if data == b"last":
                received.set()

    opened = await listening_port.open_port(Received, "127.0.0.1", 0)
    gone(opened.port, BURST, reset=reset)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.socket())
        client.connect(("127.0.0.1", opened.port))
        client.send(b"last")
        client.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(received.wait(), 10)
    await opened.close()
    return len(made) - 1


async def closing_behind_clients_that_are_gone(reset: bool) -> int:
    """The clients that were accepted of those that connected after very many that are gone, just before the port closed."""
    seen = set[asyncio.BaseTransport]()
    opened = await listening_port.open_port(lambda: Accepted(seen), "127.0.0.1", 0)
    gone(opened.port, listening_port.TAKEN_AT_ONCE + BURST, reset=reset)
    with contextlib.ExitStack() as stack:
        connected(stack, opened.port, 10)
        await opened.close()
        return len(seen)


async def ended_after_bytes() -> int:
    """The protocols that are made for clients that sent bytes and ended, where these get no answer."""
    made = list[object]()

    def factory() -> asyncio.Protocol:
        made.append(0)
        return asyncio.Protocol()

    opened = await listening_port.open_port(factory, "127.0.0.1", 0, answers_ended=False)
    gone(opened.port, BURST, reset=False, sent=b"PRI * HTTP/2.0")
    await opened.close()
    return len(made)


async def all_lost(seen: set[asyncio.BaseTransport]) -> None:
    """The clients are gone; returns when the port knows it."""
    while seen:
        await asyncio.sleep(0.01)


async def behind_a_flood() -> int:
    """The steps until a client is accepted that connected after many of another address."""
    seen, order = set[asyncio.BaseTransport](), list[object]()

    class InOrder(Accepted):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            order.append(transport.get_extra_info("peername"))

    opened = await listening_port.open_port(lambda: InOrder(seen), "127.0.0.1", 0)
    steps = 0
    with contextlib.ExitStack() as stack:
        connected(stack, opened.port, BURST)
        own = connected(stack, opened.port, 1, "127.0.0.2")[0].getsockname()
        while own not in order:
            steps += 1
            await asyncio.sleep(0)
        await opened.close()
    await all_lost(seen)
    assert order.index(own) < BURST // 2
    return steps


def ended(port: int, count: int) -> list[bytes]:
    """Clients of as many addresses that connect, send something and end their side. Returns what each sent."""
    sent = [b"ended %d" % number for number in range(count)]
    for number, text in enumerate(sent):
        with socket.socket() as client:
            client.bind((f"127.0.{1 + number // 250}.{1 + number % 250}", 0))
            client.connect(("127.0.0.1", port))
            client.send(text)
    return sent


async def order_of_opening(
    ended_clients: int, open_clients: int, most_waiting: int = listening_port.BACKLOG
) -> tuple[list[bytes], list[bytes]]:
    """What the clients sent that ended their side, and what arrived, in this order; clients that stay connect behind them,
    each from an address of its own, and send b"open"."""
    arrived = list[bytes]()

    class Received(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            arrived.append(data)

    opened = await listening_port.open_port(Received, "127.0.0.1", 0, most_waiting=most_waiting)
    sent = ended(opened.port, ended_clients)
    with contextlib.ExitStack() as stack:
        for number in range(open_clients):
            connected(stack, opened.port, 1, f"127.1.0.{1 + number}")[0].send(b"open")
        async with asyncio.timeout(10):
            while len(arrived) < ended_clients + open_clients:
                await asyncio.sleep(0)
        await opened.close()
    return sent, arrived


async def more_than_may_wait() -> tuple[int, int]:
    """The clients of a flood, and those of another address, that are accepted where a few may wait."""
    seen = set[asyncio.BaseTransport]()
    opened = await listening_port.open_port(lambda: Accepted(seen), "127.0.0.1", 0, most_waiting=20)
    with contextlib.ExitStack() as stack:
        connected(stack, opened.port, 200)
        connected(stack, opened.port, 5, "127.0.0.2")
        await opened.close()
        hosts = [each.get_extra_info("peername")[0] for each in seen]
    await all_lost(seen)
    return hosts.count("127.0.0.1"), hosts.count("127.0.0.2")


Case = Callable[[set[asyncio.BaseTransport]], Coroutine[None, None, int]]
Run = Callable[[Coroutine[None, None, int]], int]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_burst_of_connections_is_accepted_in_few_steps(run: Run) -> None:
    steps = run(a_burst(set()))
    print(f"{BURST} connections took {steps} steps of the event loop; the goal is {BURST // 8}")
    assert steps <= BURST // 8


def test_a_flood_of_connections_is_accepted_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_port, "BURST", BURST // 5)
    monkeypatch.setattr(listening_port, "OPENED_PER_S", 0)
    assert uvloop.run(a_burst(set())) >= (BURST - BURST // 5) // listening_port.LEAST_AT_ONCE


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_clients_that_have_connected_when_a_port_closes_are_accepted(run: Run) -> None:
    assert run(closing(set())) == BURST


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "ended"])
def test_clients_that_are_gone_get_no_protocol(reset: bool) -> None:
    made = uvloop.run(behind_clients_that_are_gone(reset))
    print(f"{made} of {BURST} clients that were gone got a protocol")
    assert made <= BURST // 8


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "ended"])
def test_a_port_that_closes_accepts_clients_behind_those_that_are_gone(reset: bool) -> None:
    assert uvloop.run(closing_behind_clients_that_are_gone(reset)) >= 10


def test_clients_that_sent_bytes_and_ended_get_no_protocol_where_these_get_no_answer() -> None:
    assert uvloop.run(ended_after_bytes()) <= 1


def test_a_flood_of_one_address_delays_no_client_of_another() -> None:
    steps = uvloop.run(behind_a_flood())
    print(f"a client behind {BURST} of another address took {steps} steps of the event loop; the goal is 8")
    assert steps <= 8


def test_of_too_many_that_wait_those_of_the_longest_line_are_closed() -> None:
    flood, others = uvloop.run(more_than_may_wait())
    assert others == 5
    assert flood <= 20


def test_clients_that_ended_their_side_are_served_behind_all_others() -> None:
    sent, arrived = uvloop.run(order_of_opening(BURST, 10))
    assert sorted(arrived) == sorted([*sent, *10 * [b"open"]])
    last = max(at for at, text in enumerate(arrived) if text == b"open")
    print(f"{last - 9} of {BURST} clients that ended their side came before one of 10 others")
    assert last < BURST // 8


def test_clients_that_ended_their_side_are_served_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_port, "MOST_AT_ONCE", 16)
    _, arrived = uvloop.run(order_of_opening(4, 200))
    assert max(at for at, text in enumerate(arrived) if text != b"open") < 100


def test_of_too_many_clients_that_ended_their_side_some_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_port, "MOST_ENDED", 20)
    made = list[object]()

    async def served() -> int:
        opened = await listening_port.open_port(lambda: made.append(0) or asyncio.Protocol(), "127.0.0.1", 0)
        ended(opened.port, BURST)
        await opened.close()
        return len(made)

    assert 20 <= uvloop.run(served()) <= 40


def test_clients_that_ended_their_side_take_no_place_of_others() -> None:
    seen = set[asyncio.BaseTransport]()

    async def served() -> int:
        opened = await listening_port.open_port(lambda: Accepted(seen), "127.0.0.1", 0, most_waiting=40)
        ended(opened.port, 20)
        with contextlib.ExitStack() as stack:
            for number in range(38):
                connected(stack, opened.port, 1, f"127.1.0.{1 + number}")
            await opened.close()
            return len([each for each in seen if each.get_extra_info("peername")[0].startswith("127.1.")])

    assert uvloop.run(served()) == 38


def test_a_client_that_ended_its_side_is_served_where_few_may_wait() -> None:
    sent, arrived = uvloop.run(order_of_opening(2, 0, most_waiting=2))
    assert sorted(arrived) == sent


def test_a_port_closes_while_clients_go_on_connecting() -> None:
    refused = list[OSError]()

    async def closed() -> None:
        with contextlib.ExitStack() as stack:

            def factory() -> asyncio.Protocol:
                try:
                    connected(stack, opened.port, 2)
                except OSError as error:
                    refused.append(error)
                return asyncio.Protocol()

            opened = await listening_port.open_port(factory, "127.0.0.1", 0)
            connected(stack, opened.port, 20)
            await asyncio.wait_for(opened.close(), 10)

    uvloop.run(closed())
    assert refused
