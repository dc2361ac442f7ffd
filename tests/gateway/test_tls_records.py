"""The encrypted bytes of a connection wait for their turn, and none is lost or overtaken."""

import asyncio
from typing import Any

from tidegate_gateway import reading_turns
from tidegate_gateway.edge import tls_records


class Tls:
    """Stands for the TLS protocol of a socket."""

    def __init__(self) -> None:
        self.buffer, self.got, self.ended = bytearray(256 * 1024), b"", ""

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.got += self.buffer[:nbytes]

    def eof_received(self) -> None:
        self.ended += f"eof after {len(self.got)}"

    def connection_lost(self, error: Exception | None) -> None:
        self.ended += f"lost after {len(self.got)}"


class Plain:
    """Stands for the socket."""

    def __init__(self, protocol: Tls) -> None:
        self.protocol: Any = protocol
        self.reads = True

    def get_extra_info(self, name: str) -> Any:
        return None

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def is_reading(self) -> bool:
        return self.reads

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def arrive(records: tls_records.TlsRecords, data: bytes) -> None:
    buffer = records.get_buffer(-1)
    assert len(buffer) == tls_records.READ_BYTES
    buffer[: len(data)] = data
    records.buffer_updated(len(data))


async def test_what_arrives_when_the_time_is_spent_waits_and_keeps_its_order() -> None:
    tls = Tls()
    plain: Any = Plain(tls)
    turns = reading_turns.ReadingTurns()
    records = tls_records.TlsRecords(plain, turns)
    arrive(records, b"a" * 100)
    assert tls.got == b"a" * 100
    turns.spend(1.0)
    arrive(records, b"b" * 16_000)
    arrive(records, b"c" * 16_000)
    assert (len(tls.got), plain.reads) == (100, False)
    async with asyncio.timeout(5):
        while len(tls.got) < 32_100:
            await asyncio.sleep(0)
    assert tls.got == b"a" * 100 + b"b" * 16_000 + b"c" * 16_000
    assert plain.reads
    assert turns._waiting_bytes == 0


async def test_a_socket_that_the_tls_protocol_has_paused_stays_paused() -> None:
    plain: Any = Plain(Tls())
    turns = reading_turns.ReadingTurns()
    records = tls_records.TlsRecords(plain, turns)
    turns.spend(1.0)
    plain.pause_reading()
    arrive(records, b"b")
    async with asyncio.timeout(5):
        while turns._waiting_bytes:
            await asyncio.sleep(0)
    assert not plain.reads


async def test_what_waits_is_read_before_the_end() -> None:
    for end, told in (("eof_received", "eof after 9"), ("connection_lost", "lost after 9")):
        tls = Tls()
        plain: Any = Plain(tls)
        turns = reading_turns.ReadingTurns()
        records = tls_records.TlsRecords(plain, turns)
        turns.spend(1.0)
        arrive(records, b"b" * 9)
        getattr(records, end)(*([None] if end == "connection_lost" else []))
        assert tls.ended == told
