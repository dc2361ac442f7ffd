"""Connections that bring many bytes are read in turns, and one that is lost leaves its place."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import http2_peer
import pytest

from tidegate_gateway import http_client, reading_turns
from tidegate_gateway.edge import incoming_bytes, tls_records


class Tls(asyncio.BufferedProtocol):
    """The TLS protocol of a socket."""


class Parser:
    """Takes everything."""

    def feed_data(self, data: object) -> None:
        pass


def waiting_request(turns: reading_turns.ReadingTurns) -> Callable[[], None]:
    incoming = incoming_bytes.IncomingBytes(turns, lambda data: True, lambda error: None)
    incoming.begin(http2_peer.Transport())
    incoming.take_turns()
    return incoming.end


def waiting_discard(turns: reading_turns.ReadingTurns) -> Callable[[], None]:
    incoming = incoming_bytes.IncomingBytes(turns, lambda data: True, lambda error: None)
    incoming.begin(http2_peer.Transport())
    incoming.discarded(256 * 1024)
    return incoming.end


def waiting_records(turns: reading_turns.ReadingTurns) -> Callable[[], None]:
    plain: Any = http2_peer.Transport()
    plain.get_protocol = Tls
    plain.set_protocol = plain.is_reading = lambda *_: False
    records = tls_records.TlsRecords(plain, turns)
    records._hold(b"a")
    records._held = b""
    return lambda: records.connection_lost(None)


def waiting_answer(turns: reading_turns.ReadingTurns) -> Callable[[], None]:
    made: Any = http_client.Connection(lambda one: None, turns, memoryview(bytearray(1 << 20)), 1 << 20)
    made.busy, made._transport = True, http2_peer.Transport()
    made._parser = Parser()
    made.buffer_updated(http_client.TURN_BYTES + 1)
    return lambda: made.connection_lost(None)


def waiting_frames(turns: reading_turns.ReadingTurns) -> Callable[[], None]:
    peer, _ = http2_peer.connection()
    peer.server.turns = turns
    peer._more = True
    peer._join_line()
    return lambda: peer.connection_lost(None)


@pytest.mark.parametrize("join", [waiting_request, waiting_discard, waiting_records, waiting_answer, waiting_frames])
async def test_a_connection_that_is_lost_has_no_turn(join: Callable[[Any], Callable[[], None]]) -> None:
    turns, resumed = reading_turns.ReadingTurns(), list[int]()
    losses = [join(turns) for _ in range(3)]
    turns.join(lambda: resumed.append(1))
    assert len(turns) == 4
    for lose in losses:
        lose()
    assert len(turns) == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert resumed == [1]


def test_what_nobody_needs_goes_before_long_requests() -> None:
    class Turns(reading_turns.ReadingTurns):
        def _schedule(self) -> None:
            pass

    turns = Turns()
    for size in (10, reading_turns.SMALL_BYTES + 1):
        incoming = incoming_bytes.IncomingBytes(turns, lambda data: True, lambda error: None)
        incoming._request_bytes = 100_000  # of the request that was refused
        incoming.begin(http2_peer.Transport())
        incoming.discarded(size)
    assert (len(turns._small), len(turns._line)) == (1, 1)


async def test_addresses_take_turns_and_a_connection_with_many_requests_goes_behind_the_others() -> None:
    turns, order = reading_turns.ReadingTurns(), list[str]()
    incoming = dict[str, incoming_bytes.IncomingBytes]()

    def parser(name: str) -> Callable[[bytes], bool]:
        def parse(data: bytes) -> bool:
            order.append(name)
            time.sleep(incoming_bytes.SMALL_TURN_S * 2)
            return True

        return parse

    turns.spend(2 * reading_turns.STEP_S)  # what arrives now waits
    for name, address in (("x1", "x"), ("x2", "x"), ("x3", "x"), ("y1", "y")):
        incoming[name] = incoming_bytes.IncomingBytes(turns, parser(name), lambda error: None)
        incoming[name].begin(http2_peer.Transport(), address)
        incoming[name].arrived(bytes(3 * incoming_bytes.SMALL_PIECE_BYTES))
    async with asyncio.timeout(10):
        while any(each.waits for each in incoming.values()):
            await asyncio.sleep(0)
    assert order[:4] == ["x1", "y1", "x2", "x3"], "each has one piece parsed before any has a second one"
