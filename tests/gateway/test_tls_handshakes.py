"""What handshakes of TLS may cost: few begin in one turn of the event loop, and what failed leaves nothing behind."""

import asyncio
import contextlib
import gc
import pathlib
import socket
import ssl
import struct
from typing import Any

import event_loop_turns
import pytest
import test_port_encryption
from hypothesis import given
from hypothesis import strategies as st

from tidegate_gateway import reading_turns
from tidegate_gateway.edge import client_hello, http_connection, tls_handshake


def first_message() -> bytes:
    """What a client of Python sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def hello(groups: list[int], keys: list[int]) -> bytes:
    """A first message that names these groups, and has a key of each of the second list."""
    listed = b"".join([group.to_bytes(2) for group in groups])
    shares = b"".join([key.to_bytes(2) + b"\x00\x04" + b"kkkk" for key in keys])
    extensions = b""
    for number, content in ((10, listed), (51, shares)):
        content = len(content).to_bytes(2) + content
        extensions += number.to_bytes(2) + len(content).to_bytes(2) + content
    body = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x02" + b"\x01\x00"
    body += len(extensions).to_bytes(2) + extensions
    message = b"\x01" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message


def may_begin(sent: bytes) -> bool | None:
    return client_hello.FirstMessage().may_begin(bytearray(sent))


async def connected(address: str, count: int, sent: bytes) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    made = []
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(one, sent)
        made.append(one)
    return made


async def test_no_handshake_begins_with_a_client_that_is_gone(
    up: Any, until: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tls_handshake.HandshakeLine] = []
    begun: list[tls_handshake.TlsHandshake] = []
    following = tls_handshake.HandshakeLine._next
    monkeypatch.setattr(tls_handshake.HandshakeLine, "_next", lambda line: lines.append(line))
    monkeypatch.setattr(tls_handshake.HandshakeLine, "began", lambda line, one: begun.append(one))
    async with up(store=False, tls=test_port_encryption.certificate(tmp_path)) as client:
        sockets = await connected(client.url.removeprefix("http://"), 20, first_message())
        await until(lambda: lines and len(lines[0]) == 20)
        for one in sockets[1:]:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            one.close()
        monkeypatch.setattr(tls_handshake.HandshakeLine, "_next", following)
        following(lines[0])
        await until(lambda: not lines[0])
        assert len(begun) == 1
        sockets[0].close()


async def test_few_handshakes_begin_in_one_turn_of_the_event_loop(
    up: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = test_port_encryption.certificate(tmp_path)
    turns = event_loop_turns.Turns()
    start = tls_handshake.TlsHandshake.start

    def started(self: tls_handshake.TlsHandshake) -> bool:
        turns.add()
        return start(self)

    monkeypatch.setattr(tls_handshake.TlsHandshake, "start", started)
    async with up(store=False, tls=tls, listen={"grpcPort": 0}) as client, event_loop_turns.running(turns):
        for address in (client.url.removeprefix("http://"), client.grpc):
            turns.counts.clear()
            sockets = await connected(address, 40, first_message())
            async with asyncio.timeout(20):
                for one in sockets:
                    assert await asyncio.get_running_loop().sock_recv(one, 1) == b"\x16"
                    one.close()
            assert sum(turns.counts.values()) == 40
            assert max(turns.counts.values()) <= 2 * tls_handshake.AT_ONCE, "a turn of the counter may see parts of two"


class Waiting:
    """A handshake that only tells when it begins."""

    def __init__(self, address: str, begun: list[str], *, gone: bool = False) -> None:
        self.address, self._begun, self._gone = address, begun, gone

    def start(self) -> bool:
        if not self._gone:
            self._begun.append(self.address)
        return not self._gone


async def test_addresses_take_turns() -> None:
    line: Any = tls_handshake.HandshakeLine(reading_turns.ReadingTurns())
    begun: list[str] = []
    for address in "aaaaaaaab":
        line.join(Waiting(address, begun))
    line.join(Waiting("c", begun, gone=True))
    async with asyncio.timeout(5):
        while len(begun) < 9:
            await asyncio.sleep(0)
    assert "".join(begun) == "abaaaaaaa"


async def test_a_known_address_waits_behind_no_unknown_ones_and_they_wait_no_longer_than_for_their_part() -> None:
    line: Any = tls_handshake.HandshakeLine(reading_turns.ReadingTurns())
    begun: list[str] = []
    line.ended(Waiting("known", begun), made=True)
    line.ended(Waiting("failed", begun), made=False)
    for number in range(6):
        line.join(Waiting(f"new {number}", begun))
    for address in ("failed", *["known"] * 6):
        line.join(Waiting(address, begun))
    async with asyncio.timeout(5):
        while len(line):
            await asyncio.sleep(0)
    assert begun[:6] == ["known", "known", "new 0", "known", "known", "new 1"]
    assert begun[-1] == "failed"
    for number in range(2 * tls_handshake.MOST_KNOWN):
        line.ended(Waiting(f"{number}", begun), made=True)
    assert len(line._addresses) == tls_handshake.MOST_KNOWN


async def test_clients_that_are_gone_keep_nobody_waiting() -> None:
    line: Any = tls_handshake.HandshakeLine(reading_turns.ReadingTurns())
    begun: list[str] = []
    for _ in range(1000):
        line.join(Waiting("a", begun, gone=True))
    lost = Waiting("b", begun)
    line.join(lost)
    line.leave(lost)
    line.join(Waiting("a", begun))
    assert len(line) == 1001
    async with asyncio.timeout(5):
        while len(line):
            await asyncio.sleep(0)
    assert begun == ["a"]


async def test_the_port_cuts_waiting_clients_and_they_leave_the_line(
    up: Any, until: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tls_handshake.HandshakeLine] = []
    monkeypatch.setattr(tls_handshake.HandshakeLine, "_next", lambda line: lines.append(line))
    limits = {"connections": 10, "connectionsPerAddress": 10}
    async with up(store=False, tls=test_port_encryption.certificate(tmp_path), limits=limits) as client:
        sockets = await connected(client.url.removeprefix("http://"), 8, first_message())
        await until(lambda: lines and len(lines[0]) == 8)
        for one in list(lines[0]._unknown)[:3]:
            one.abort()
        await until(lambda: len(lines[0]) == 5)
        for one in sockets:
            one.close()


async def test_of_too_many_handshakes_that_wait_for_their_clients_the_oldest_are_cut(
    up: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_handshake, "MOST_OPEN", 3)
    async with up(store=False, tls=test_port_encryption.certificate(tmp_path)) as client:
        sockets = await connected(client.url.removeprefix("http://"), 8, first_message())
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(tls_handshake.WITHIN_S / 2):  # before they are cut for being slow
            for one in sockets[:5]:
                with contextlib.suppress(ConnectionError):
                    while await loop.sock_recv(one, 65536):
                        pass
            assert await test_port_encryption.shown(client.url) == "gateway"
        for one in sockets:
            one.close()


async def test_a_client_that_does_not_finish_its_first_message_is_cut_and_costs_no_handshake(
    up: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_handshake, "WITHIN_S", 0.3)
    tls = test_port_encryption.certificate(tmp_path)
    async with up(store=False, tls=tls, listen={"grpcPort": 0}) as client:
        monkeypatch.setattr(tls_handshake.TlsHandshake, "start", None)
        for address in (client.url.removeprefix("http://"), client.grpc):
            for sent in (b"", first_message()[:100], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(40_000)):
                [one] = await connected(address, 1, sent)
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionError):
                        assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
                one.close()


async def test_failed_handshakes_leave_nothing_for_the_garbage_collector(
    up: Any, until: Any, tmp_path: pathlib.Path
) -> None:
    def left() -> int:
        return sum(type(each) is http_connection.Connection for each in gc.get_objects())

    async with up(store=False, tls=test_port_encryption.certificate(tmp_path)) as client:
        gc.collect()
        gc.disable()
        try:
            sockets = await connected(client.url.removeprefix("http://"), 20, first_message())
            for one in sockets:
                assert await asyncio.get_running_loop().sock_recv(one, 1) == b"\x16"
            assert left() >= 20
            for one in sockets:
                one.close()
            await until(lambda: left() == 0)
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("groups", "keys", "may"),
    [
        ([29, 23], [29], True),
        ([29, 256], [29, 256], True),
        ([29, 23, 260], [], True),
        ([4588, 29], [4588, 29], True),
        ([29, 260], [260, 29], False),
        ([29, 260], [260], False),
        ([4588, 29, 256], [4588, 256], False),
        ([256, 257], [], False),
    ],
)
def test_a_handshake_over_a_finite_field_does_not_begin(groups: list[int], keys: list[int], may: bool) -> None:
    assert may_begin(hello(groups, keys)) is may


def test_a_first_message_is_read_however_it_is_cut() -> None:
    whole = first_message()
    assert [may_begin(whole[:size]) for size in range(len(whole))] == [None] * len(whole)
    assert may_begin(whole)
    records = b"".join(
        [
            b"\x16\x03\x01\x00" + bytes([len(whole[5:][at : at + 50])]) + whole[5:][at : at + 50]
            for at in range(0, len(whole) - 5, 50)
        ]
    )
    assert may_begin(records)
    assert may_begin(records[:-1]) is None
    sent, first = bytearray(), client_hello.FirstMessage()
    found = []
    for byte in records:
        sent.append(byte)
        found.append(first.may_begin(sent))
    assert found == [None] * (len(records) - 1) + [True]


@given(st.binary(max_size=200), st.binary(max_size=400))
def test_no_first_message_is_an_exception(start: bytes, rest: bytes) -> None:
    may_begin(start)
    body = bytes(34) + rest
    found = may_begin(b"\x16\x03\x01" + (4 + len(body)).to_bytes(2) + b"\x01" + len(body).to_bytes(3) + body)
    assert found in (True, False)


async def test_a_gateway_that_leaves_lets_a_handshake_end(up: Any, tmp_path: pathlib.Path) -> None:
    tls = test_port_encryption.certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=tls["certFile"])
    trusted.check_hostname = False
    trusted.set_alpn_protocols(["h2"])
    async with up(store=False, tls=tls, listen={"grpcPort": 0}) as client:
        (opened,) = await connected(client.grpc, 1, b"")
        (ask,) = client.gateway.leaving
        while not ask.__self__.connections:
            await asyncio.sleep(0)
        ask()
        reader, writer = await asyncio.open_connection(sock=opened, ssl=trusted, server_hostname="gateway")
        async with asyncio.timeout(5):
            frames = await reader.read(200)
        writer.close()
    assert b"\x07\x00\x00\x00\x00\x00" in frames, "SETTINGS, then GOAWAY"
