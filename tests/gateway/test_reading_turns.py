"""Connections that bring many bytes are read in turns, and one that is lost leaves its place."""

import asyncio
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
