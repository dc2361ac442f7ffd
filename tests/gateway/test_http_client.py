"""Connections to engines: reuse, every framing of an answer, and engines that break the protocol."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import event_loop_turns
import pytest

from tidegate_gateway import gateway_settings, http_client, reading_turns
from tidegate_gateway.lifecycle import engine_client
from tidegate_gateway.openai import endpoint_registry, error_table, parsed_request, request_fields

REQUEST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Engine:
    """Writes fixed bytes for each request."""

    def __init__(self, answers: list[bytes], *, closes: bool) -> None:
        self.url = ""
        self.connections = 0
        self.lost = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self.length = len(REQUEST)
        """Of each request."""
        self._answers = answers
        self._closes = closes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await reader.readexactly(self.length)
                    for part in self._answers:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0.01)
                    if self._closes:
                        break
        finally:
            self.lost += 1
            writer.close()
            self.writers.discard(writer)


@contextlib.asynccontextmanager
async def engine(*answers: bytes, closes: bool = False) -> AsyncIterator[Engine]:
    serving = Engine(list(answers), closes=closes)
    server = await asyncio.start_server(serving.serve, "127.0.0.1", 0)
    serving.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield serving
    finally:
        server.close()
        while serving.writers:
            for writer in [*serving.writers]:
                writer.transport.abort()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)


@pytest.fixture
async def pool() -> AsyncIterator[http_client.Connections]:
    connections = http_client.Connections(connect_s=2.0)
    yield connections
    connections.close()
    await asyncio.sleep(0.01)


async def asked(pool: http_client.Connections, url: str) -> tuple[int, str, bytes]:
    """One request; status, content type and body."""
    connection = await pool.get(url)
    try:
        await connection.send(REQUEST)
        body = b""
        while data := await connection.read():
            body += data
        return connection.status, connection.content_type, body
    finally:
        connection.release()


async def test_a_connection_carries_one_request_after_the_other(pool: http_client.Connections) -> None:
    async with engine(OK) as serving:
        for _ in range(3):
            assert await asked(pool, serving.url) == (200, "text/plain", b"hello")
        assert serving.connections == 1


@pytest.mark.parametrize(
    ("answers", "closes", "reused"),
    [
        ([OK[:20], OK[20:41], OK[41:]], False, True),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\nA: b\r\n\r\n"],
            False,
            True,
        ),
        ([b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo"], True, False),
        ([b"HTTP/1.0 200 OK\r\n\r\nhello"], True, False),
        ([OK.replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n")], True, False),
        ([b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n", OK], False, True),
    ],
    ids=["pieces", "chunks", "until the end", "HTTP/1.0", "closes", "an interim answer"],
)
async def test_every_framing_of_an_answer_is_read_to_its_end(
    pool: http_client.Connections, answers: list[bytes], closes: bool, reused: bool
) -> None:
    async with engine(*answers, closes=closes) as serving:
        for _ in range(2):
            status, _, body = await asked(pool, serving.url)
            assert (status, body) == (200, b"hello")
        assert serving.connections == (1 if reused else 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        CHUNKED + b"zz\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
        b"",
    ],
    ids=[
        "not HTTP",
        "two lengths",
        "length and chunks",
        "a broken chunk",
        "an upgrade",
        "short",
        "a huge head",
        "nothing",
    ],
)
async def test_a_broken_answer_is_a_lost_connection(pool: http_client.Connections, answer: bytes) -> None:
    async with engine(answer, closes=True) as serving:
        with pytest.raises(http_client.ConnectionLost):
            await asked(pool, serving.url)


async def test_bytes_that_belong_to_no_request_end_the_connection(pool: http_client.Connections) -> None:
    async with engine(OK + OK) as serving:
        first = await pool.get(serving.url)
        with contextlib.suppress(http_client.ConnectionLost):
            await first.send(REQUEST)
            while await first.read():
                pass
        first.release()
        second = await pool.get(serving.url)
        assert second is not first
        second.close()


async def test_closing_early_ends_the_connection_of_the_engine(
    pool: http_client.Connections, until: Callable[..., object]
) -> None:
    async with engine(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhello", OK) as serving:
        connection = await pool.get(serving.url)
        await connection.send(REQUEST)
        connection.release()
        await until(lambda: serving.lost == 1)  # type: ignore[misc]


async def test_an_answer_that_nobody_reads_stops_the_engine(pool: http_client.Connections) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n"
    async with engine(head, *[b"x" * 1_000_000] * 50) as serving:
        connection = await pool.get(serving.url)
        await connection.send(REQUEST)
        await asyncio.sleep(0.5)
        size = 0
        while data := await connection.read():
            assert len(data) < 4_000_000, "unread bytes are bounded"
            size += len(data)
        assert size == 50_000_000
        connection.release()


GET = b"GET /v1/models HTTP/1.1\r\nHost: %s\r\nAccept: */*\r\n\r\n"


@contextlib.asynccontextmanager
async def pages(*answers: bytes) -> AsyncIterator[Engine]:
    """An engine that answers requests for a page."""
    async with engine(*answers) as serving:
        serving.length = len(GET) - 2 + len(serving.url.removeprefix("http://"))
        yield serving


async def test_a_page_is_read_whole(pool: http_client.Connections) -> None:
    async with pages(OK) as serving:
        for _ in range(2):
            assert await pool.page(serving.url + "/v1/models", most_bytes=5) == (200, b"hello")
        assert serving.connections == 1


async def test_a_page_that_is_too_large_is_a_lost_connection(pool: http_client.Connections) -> None:
    async with pages(OK) as serving:
        with pytest.raises(http_client.ConnectionLost, match="more than 4 bytes"):
            await pool.page(serving.url + "/v1/models", most_bytes=4)


async def test_the_page_of_another_status_is_not_read(pool: http_client.Connections) -> None:
    async with pages(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 500\r\n\r\n") as serving:
        assert await pool.page(serving.url + "/v1/models", most_bytes=1000) == (302, b"")


async def test_interim_answers_without_end_are_a_lost_connection(pool: http_client.Connections) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * 4000
    async with pages(*[interim] * 1000) as serving:
        with pytest.raises(http_client.ConnectionLost, match="without a byte of its body"):
            await pool.page(serving.url + "/v1/models", most_bytes=1000)


async def test_nobody_listens(pool: http_client.Connections) -> None:
    with pytest.raises(http_client.NotReachable, match="takes no connections"):
        await asked(pool, "http://127.0.0.1:1")


async def test_engines_that_send_much_are_read_in_turns(
    pool: http_client.Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = event_loop_turns.Turns()
    received = http_client.Connection.buffer_updated

    def counted(self: http_client.Connection, nbytes: int) -> None:
        if nbytes > http_client.TURN_BYTES:
            turns.add()
        received(self, nbytes)

    monkeypatch.setattr(http_client.Connection, "buffer_updated", counted)
    answers, piece = 20, b"1\r\nx\r\n" * 50_000
    async with engine(CHUNKED, piece, b"0\r\n\r\n") as serving, event_loop_turns.running(turns):
        found = await asyncio.gather(*(asked(pool, serving.url) for _ in range(answers)))
    assert {len(body) for _, _, body in found} == {50_000}
    # Whoever has sent little for a while is read once before it joins the line.
    few = 2 * reading_turns.AT_ONCE
    assert sum(max(0, count - few) for count in turns.counts.values()) <= 2 * answers


async def test_large_answers_are_bounded_in_sum() -> None:
    limits = gateway_settings.Limits(bodies_bytes=3 * 1024 * 1024)
    connections = http_client.Connections(connect_s=2.0)
    client = engine_client.EngineClient(connections, limits=limits)
    completions = next(kind for kind in endpoint_registry.ENDPOINTS if kind.path == "/v1/completions")
    body = {"model": "m", "prompt": "x"}
    request = parsed_request.from_body(completions, body, request_fields.RequestFields(), most_choices=1)
    large = b'{"choices": [{"text": "%s"}]}' % (b"x" * 2 * 1024 * 1024)
    begin = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(large)
    async with engine(begin + large[:-2], large[-2:]) as serving:
        opening = [client.open(serving.url, request, b"hi", {}) for _ in range(6)]
        found = await asyncio.gather(*opening, return_exceptions=True)
        shed = [one for one in found if isinstance(one, error_table.Shed)]
        assert 0 < len(shed) < 6
        assert (await client.open(serving.url, request, b"hi", {})).first == large, "nothing stays counted"
    connections.close()


class Dripping:
    """A connection, and the only one of its pool, whose answer of 300,000 bytes comes in parts of two."""

    status, content_type, ended = 400, "application/json", True

    def __init__(self) -> None:
        self._left = 150_000

    async def get(self, origin: str) -> "Dripping":
        return self

    async def send(self, request: bytes) -> None:
        pass

    async def read(self) -> bytes:
        self._left -= 1
        return b"%02d" % (self._left % 100) if self._left >= 0 else b""

    def close(self) -> None:
        pass


async def test_an_answer_that_comes_in_very_small_parts_takes_no_more_memory_than_another() -> None:
    client = engine_client.EngineClient(cast("Any", Dripping()), limits=gateway_settings.Limits())
    completions = next(kind for kind in endpoint_registry.ENDPOINTS if kind.path == "/v1/completions")
    body = {"model": "m", "prompt": "x"}
    request = parsed_request.from_body(completions, body, request_fields.RequestFields(), most_choices=1)
    tracemalloc.start()
    reply = await client.open("http://127.0.0.1:9", request, b"hi", {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reply.first == b"".join([b"%02d" % (left % 100) for left in reversed(range(150_000))])
    assert peak < 3 * len(reply.first), "the parts, and the whole answer"


def test_the_first_lines_of_requests_to_an_engine_are_made_once() -> None:
    url = "http://127.0.0.1:8000/v1/completions"
    assert http_client.request_start("POST", url) is http_client.request_start("POST", url)
