"""The work of parsing takes turns, whatever a body weighs: small chunks, their extensions, and many clients at once."""

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

import fake_engine
from tidegate_gateway import reading_turns
from tidegate_gateway.edge import framing_errors, incoming_bytes

if TYPE_CHECKING:
    from tidegate_gateway.openai import error_table

START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CALL = {"model": "fake", "prompt": "x", "max_tokens": 1}


async def asked(client: Any, sent: bytes) -> bytes:
    """The first line of the answer, and what came with it."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(20):
        found = await reader.read(2000)
    writer.close()
    return found


def chunked(pieces: list[bytes], extension: bytes = b"") -> bytes:
    return START + b"".join([b"%x%s\r\n%s\r\n" % (len(each), extension, each) for each in pieces]) + b"0\r\n\r\n"


@pytest.mark.parametrize("extension", [b"", b";a=" + b"b" * 200], ids=["plain", "with extensions"])
async def test_a_body_of_many_tiny_chunks_is_refused_at_once(up: Any, extension: bytes) -> None:
    async with up(store=False) as client:
        found = await asked(client, chunked([b" "] * (framing_errors.SMALL_CHUNKS + 200), extension))
        assert found.startswith(b"HTTP/1.1 400")
        assert b"chunks that are too small" in found


async def test_honest_uploads_in_chunks_are_taken(up: Any) -> None:
    call = json.dumps(CALL).encode()
    encoded = [each.encode() for each in json.JSONEncoder().iterencode({**CALL, "stop": ["a"] * 3, "user": "x"})]
    padded = {name: [call, *[each] * count] for name, each, count in [
        ("lines", b" " * 64, 5000), ("words", b" " * 8, 900), ("large", b" " * 16_384, 60)]}  # fmt: skip
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for pieces in (encoded, *padded.values()):
            assert (await asked(client, chunked(pieces))).startswith(b"HTTP/1.1 200")
        assert (await asked(client, chunked([call], b";" + b"x" * 8000))).startswith(b"HTTP/1.1 200")


class Costly:
    """A connection whose bytes take a millisecond for each piece."""

    def __init__(self, turns: reading_turns.ReadingTurns) -> None:
        self.parsed = 0
        self.refused: list[error_table.GatewayError] = []
        self.incoming = incoming_bytes.IncomingBytes(turns, self._parse, self.refused.append)
        self.incoming.begin(Pausing())

    def _parse(self, data: bytes) -> bool:
        time.sleep(0.001)
        self.parsed += len(data)
        return True


class Pausing(asyncio.Transport):
    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


BYTES = 6 * incoming_bytes.PIECE_BYTES


async def test_what_costs_much_to_parse_is_parsed_in_turns_and_small_requests_go_first() -> None:
    turns = reading_turns.ReadingTurns()
    costly = [Costly(turns) for _ in range(40)]
    for each in costly:
        each.incoming.arrived(bytes(BYTES))
    assert sum(each.parsed for each in costly) < 20 * BYTES, (
        "of 240 ms of work, 10 ms and the last piece are done at once"
    )
    small = Costly(turns)
    small.incoming.arrived(bytes(500))
    async with asyncio.timeout(10):
        while not small.parsed:
            await asyncio.sleep(0)
        assert sum(each.parsed for each in costly) < 20 * BYTES, "it has not waited for the others"
        while any(each.parsed < BYTES for each in costly):
            await asyncio.sleep(0)
    assert not turns.must_wait(0)
    assert not any(each.incoming.waits for each in costly)


async def test_one_connection_alone_has_a_few_milliseconds_of_a_step() -> None:
    alone = Costly(reading_turns.ReadingTurns())
    alone.incoming.arrived(bytes(BYTES))
    assert 0 < alone.parsed < BYTES
    alone.incoming.arrived(bytes(10))
    async with asyncio.timeout(10):
        while alone.parsed < BYTES + 10:
            await asyncio.sleep(0)


async def test_a_client_for_whose_bytes_there_is_no_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_turns, "MOST_BYTES", BYTES)
    turns = reading_turns.ReadingTurns()
    turns.spend(2 * reading_turns.STEP_S)
    first, second = Costly(turns), Costly(turns)
    first.incoming.arrived(bytes(BYTES))
    second.incoming.arrived(bytes(BYTES))
    assert not first.refused
    assert [error.code for error in second.refused] == ["saturated"]
    first.incoming.end()  # its client hangs up
    assert turns.must_wait(BYTES), "its bytes count no longer"
