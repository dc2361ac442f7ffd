"""A client connection keeps HTTP/1.1's rules, whatever a client sends: plain sockets, and the answers byte by byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import http2_peer
import orjson
import pytest

import fake_engine
from tidegate_gateway import gateway_settings
from tidegate_gateway.edge import framing_errors, http_connection, http_listener, http_messages
from tidegate_gateway.openai import error_table

CALL = orjson.dumps({"model": "fake", "prompt": "x", "max_tokens": 2})
STREAM = orjson.dumps({"model": "fake", "prompt": "x", "max_tokens": 2, "stream": True})


def post(body: bytes, *more: bytes, version: bytes = b"1.1", target: bytes = b"/v1/completions") -> bytes:
    head = [b"POST %s HTTP/%s" % (target, version), b"Host: x", b"Content-Length: %d" % len(body), *more]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def plain(client: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One whole answer with a length or in chunks."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if "content-length" in headers:
        return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    assert headers["transfer-encoding"] == "chunked"
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.readexactly(2) == b"\r\n"
    return int(first.split()[1]), headers, body


async def test_requests_that_come_together_are_answered_one_after_the_other(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client, plain(client) as (reader, writer):
        ids = [b"X-Request-Id: r%d" % i for i in range(5)]
        writer.write(b"".join(post(STREAM if i % 2 else CALL, each) for i, each in enumerate(ids)))
        for i in range(5):
            status, headers, body = await answer(reader)
            assert (status, headers["x-request-id"]) == (200, f"r{i}")
            assert body.endswith(b"[DONE]\n\n") is bool(i % 2)


async def test_too_many_requests_at_once_end_the_connection_after_those_before_them(up: Any) -> None:
    async with up(store=False) as client, plain(client) as (reader, writer):
        most = framing_errors.PIPELINED
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * (most + 30))
        for _ in range(most + 1):
            assert (await answer(reader))[0] == 200
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert b"may wait on one connection" in body
        assert await reader.read() == b""


async def test_a_connection_ends_after_wrong_requests_in_a_row_but_not_if_good_ones_come_between(up: Any) -> None:
    most, wrong, good = framing_errors.REJECTED_IN_A_ROW, post(b"{"), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with up(store=False) as client, plain(client) as (reader, writer):
        for _ in range(2):
            writer.write(wrong * (most - 1) + good)
            found = [await answer(reader) for _ in range(most)]
            assert [status for status, _, _ in found] == [400] * (most - 1) + [200]
            assert all(headers.get("connection") != "close" for _, headers, _ in found)
        writer.write(wrong * (most + 3))
        found = [await answer(reader) for _ in range(most)]
        assert [headers.get("connection") == "close" for _, headers, _ in found] == [False] * (most - 1) + [True]
        assert await reader.read() == b""


async def test_the_answers_before_the_end_of_a_connection_reach_a_client_that_still_sends(up: Any) -> None:
    wrong = post(b"{" * 60_000)
    async with up(store=False) as client, plain(client) as (reader, writer):
        writer.write(wrong * 12)
        await asyncio.sleep(0.5)
        found = [await answer(reader) for _ in range(framing_errors.REJECTED_IN_A_ROW)]
        assert [status for status, _, _ in found] == [400] * framing_errors.REJECTED_IN_A_ROW
        assert found[-1][1]["connection"] == "close"


def test_the_oldest_of_too_many_connections_that_wait_for_their_clients_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lingering:
        address, cut = "", False

        def abort(self) -> None:
            self.cut = True

    async def serve() -> http_listener.Server:
        return http_listener.Server(http_listener.Routes([]), gateway_settings.Limits(), leaving=lambda: False)

    server = asyncio.run(serve())
    every: list[Any] = [Lingering() for _ in range(http_listener.LINGERING + 2)]
    for connection in every[:3]:
        server.lingers(connection)
    server.closed(every[1])
    for connection in every[3:]:
        server.lingers(connection)
    assert [connection.cut for connection in every] == [True] + [False] * (len(every) - 1)


async def test_a_request_in_many_pieces_is_one_request(up: Any) -> None:
    request = post(CALL, b"Content-Type: application/json")
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX: y\r\n\r\n"
    )
    async with fake_engine.engine() as engine, up(engine, store=False) as client, plain(client) as (reader, writer):
        for whole in (request, chunked % (len(CALL), CALL)):
            for i in range(0, len(whole), 7):
                writer.write(whole[i : i + 7])
                await writer.drain()
                await asyncio.sleep(0)
            assert (await answer(reader))[0] == 200


async def test_an_old_client_gets_a_body_that_ends_with_its_connection(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for body in (CALL, STREAM):
            async with plain(client) as (reader, writer):
                writer.write(post(body, version=b"1.0"))
                head, _, text = (await reader.read()).partition(b"\r\n\r\n")
                assert b" 200 OK" in head
                assert b"chunked" not in head
                assert text.endswith(b"[DONE]\n\n") is (body is STREAM)


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_or_the_error(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False, limits={"bodyBytes": 1000}) as client:
        async with plain(client) as (reader, writer):
            head, _, body = post(CALL, b"Expect: 100-continue").partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await answer(reader))[0] == 200
        async with plain(client) as (reader, writer):
            writer.write(post(b"x" * 5000, b"Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            assert (await answer(reader))[0] == 413


@pytest.mark.parametrize(
    "target", [b"http://other.example/v1/completions", b"/v1/completions?a=b", b"/v1/%63ompletions"]
)
async def test_every_form_of_a_target_finds_its_path(up: Any, target: bytes) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client, plain(client) as (reader, writer):
        writer.write(post(CALL, target=target))
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("pieces", [1, 2])
async def test_an_offer_of_another_protocol_is_ignored(up: Any, pieces: int) -> None:
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    whole = post(CALL, *offer)
    async with fake_engine.engine() as engine, up(engine, store=False) as client, plain(client) as (reader, writer):
        for _ in range(2):
            writer.write(whole if pieces == 1 else whole[:-20])
            if pieces == 2:
                await asyncio.sleep(0.1)
                writer.write(whole[-20:])
            status, _, body = await answer(reader)
            assert (status, orjson.loads(body)["usage"]["completion_tokens"]) == (200, 2)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"\r\n".join(offer) + b"\r\n\r\n")
        assert (await answer(reader))[0] == 200
        assert [body["prompt"] for body in engine.bodies] == ["x", "x"]


async def test_a_path_that_does_not_exist_is_answered_before_its_body(up: Any) -> None:
    async with up(store=False) as client, plain(client) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert (await answer(reader))[0] == 404


async def test_a_second_slow_head_is_given_up(up: Any) -> None:
    async with up(store=False, limits={"idle": "300ms"}) as client, plain(client) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTT")
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_a_body_that_breaks_off_ends_the_connection_and_nothing_else(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        async with plain(client) as (_, writer):
            writer.write(post(CALL)[:-5])
            await writer.drain()
        async with plain(client) as (reader, writer):
            writer.write(post(CALL))
            assert (await answer(reader))[0] == 200
        assert len(engine.bodies) == 1
        await until(lambda: client.gateway.placements.in_progress == 0)


@pytest.mark.parametrize(
    "endless",
    [b"X: " + b"y" * 60_000, b"y" * 60_000],
    ids=["a trailer", "an extension of a chunk"],
)
async def test_framing_that_never_ends_is_cut(up: Any, endless: bytes) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    start += b"0\r\n" if endless.startswith(b"X") else b"1;"
    async with up(store=False) as client, plain(client) as (reader, writer):
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0)
        assert (await answer(reader))[0] == 431


async def test_a_request_that_waits_for_the_gateway_does_not_run_out_of_time(up: Any) -> None:
    limits = {"body": "300ms"}
    async with (
        fake_engine.engine(first_s=0.8) as engine,
        up(engine, store=False, limits=limits) as client,
        plain(client) as (reader, writer),
    ):
        third = post(CALL)
        writer.write(post(CALL) + post(CALL) + third[:-10])
        assert (await answer(reader))[0] == 200
        writer.write(third[-10:])
        for _ in range(2):
            assert (await answer(reader))[0] == 200


async def test_a_strange_coding_beside_an_offer_of_another_protocol_is_an_error(up: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    async with up(store=False) as client, plain(client) as (reader, writer):
        writer.write(head + b"Transfer-Encoding: \xff, chunked\r\n\r\n0\r\n\r\n")
        assert (await answer(reader))[0] == 400


async def test_an_old_client_that_would_keep_its_connection_is_told_that_it_closes(up: Any) -> None:
    async with up(store=False) as client, plain(client) as (reader, writer):
        writer.write(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await answer(reader))[1]["connection"] == "close"
        assert await reader.read() == b""


async def test_the_first_request_of_a_connection_follows_no_other_one() -> None:
    """Else a probe that has arrived before its connection has a task would wait behind all pipelined requests."""
    took = list[bool]()

    class Server(http_listener.Server):
        async def turn_of(self, request: http_messages.Request, *, follows: bool) -> None:
            took.append(follows)

    async def health(request: http_messages.Request) -> http_messages.Response:
        raise error_table.BadRequest("no")

    route = http_listener.Route(method="GET", path="/health", handler=health, without_key=True)
    server = Server(http_listener.Routes([route]), gateway_settings.Limits(), leaving=lambda: False)
    connection, transport = server(), http2_peer.Transport()
    connection.connection_made(transport)
    connection.data_received(2 * b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        while transport.written.count(b"HTTP/1.1 400") < 2:
            await asyncio.sleep(0)
    connection.connection_lost(None)
    assert took == [False, True]


async def test_bodies_that_handlers_let_go_after_the_connections_are_lost_count_once() -> None:
    """Many connections that are lost at the same instant end one after the other, and their handlers go on until then."""
    stored = asyncio.Event()

    async def submit(request: http_messages.Request, connection: http_connection.Connection) -> None:
        await stored.wait()
        connection.release_body()

    route = http_listener.Route(method="POST", path="/rows", handler=submit, streams=True, without_key=True)
    server = http_listener.Server(http_listener.Routes([route]), gateway_settings.Limits(), leaving=lambda: False)
    connections = [server() for _ in range(40)]
    for each in connections:
        each.connection_made(http2_peer.Transport())
        each.data_received(post(b"x" * 1000, target=b"/rows"))
    async with asyncio.timeout(10):
        while any(each._present is None for each in connections):
            await asyncio.sleep(0)
    assert server.bodies.used == 40_000
    stored.set()
    for each in connections:
        each.connection_lost(None)
    async with asyncio.timeout(10):
        while any(each.task is not None for each in connections):
            await asyncio.sleep(0)
    assert server.bodies.used == 0
