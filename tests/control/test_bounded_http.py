"""Requests to a server that answers with any bytes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable

import pytest

from tidegate_control import bounded_http

MOST_BYTES = 100_000
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """Sends `parts` to each client, the last one again and again if it `repeats`, and then ends its side or waits."""

    def __init__(self, parts: Iterable[bytes], *, ends: bool = False, repeats: bool = False) -> None:
        self._parts, self._ends, self._repeats = [*parts], ends, repeats
        self.received: list[bytes] = []
        self.url = ""
        self.clients: list[asyncio.Task[None] | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.append(asyncio.current_task())
        self.received.append(await reader.read(65536))
        try:
            for part in self._parts:
                writer.write(part)
                await writer.drain()
            while self._repeats:
                writer.write(self._parts[-1])
                await writer.drain()
            if not self._ends:
                await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    server.url = f"http://{host}:{port}/a/path?query=1"
    async with listening:
        yield server
    await asyncio.gather(*filter(None, server.clients))


async def asked(server: Server, *, timeout_s: float = 20.0) -> bounded_http.Answer:
    async with serving(server):
        return await bounded_http.Client().request(
            "GET", server.url, headers={"x-name": "value"}, most_bytes=MOST_BYTES, timeout_s=timeout_s
        )


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        (HEAD + b"content-length: 2\r\n\r\nab", False),
        (CHUNKED + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\n\r\nab", True),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + HEAD + b"content-length: 2\r\n\r\nab", False),
        (b"HTTP/1.1 103 Early Hints\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nab", True),
        (HEAD + b"transfer-encoding: identity\r\n\r\nab", True),
        (HEAD + b"content-length: 2\r\n\r\nabHTTP/1.1 500 X\r\ncontent-length: 1\r\n\r\nc", False),
    ],
)
async def test_an_answer_has_a_status_and_a_body_however_they_arrive(sent: bytes, ends: bool) -> None:
    for size in (1, 7, len(sent)):
        parts = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert await asked(Server(parts, ends=ends)) == bounded_http.Answer(200, b"ab")


async def test_a_redirect_is_an_answer() -> None:
    sent = b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
    assert await asked(Server([sent])) == bounded_http.Answer(307, b"")


async def test_a_request_has_the_path_the_headers_and_the_body() -> None:
    async with serving(Server([HEAD + b"content-length: 0\r\n\r\n"])) as server:
        await bounded_http.Client().request(
            "PUT", server.url, headers={"x-name": "value"}, body=b"{}", most_bytes=10, timeout_s=20.0
        )
    (received,) = server.received
    head, _, body = received.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    assert line == "PUT /a/path?query=1 HTTP/1.1"
    assert {"x-name: value", "connection: close", "content-length: 2"} <= set(fields)
    assert body == b"{}"


@pytest.mark.parametrize(
    ("sent", "ends", "says"),
    [
        (b"\0\0\0\0", False, "the answer is not HTTP"),
        (HEAD + b"content-length: 3\r\n\r\nab", True, "the answer is not whole"),
        (CHUNKED + b"1\r\na\r\n", True, "the answer is not whole"),
        (HEAD + b"content-length: 100001\r\n\r\n" + bytes(100_001), False, "more than 100000 bytes"),
        (b"HTTP/1.1 101 Other\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", False, "changes the protocol"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_named(sent: bytes, ends: bool, says: str) -> None:
    with pytest.raises(bounded_http.BadAnswer, match=says):
        await asked(Server([sent], ends=ends))


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"\r\n", b"[" * 10_000],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100],
        [HEAD, b"a: b\r\n" * 100],
        [HEAD + b"a: ", b"b" * 10_000],
        [CHUNKED, b"1\r\n \r\n" * 100],
        [CHUNKED, b"1;" + b"x" * 1000 + b"\r\n \r\n"],
    ],
    ids=["body", "interim responses", "headers", "one header", "chunks", "chunk extensions"],
)
async def test_an_answer_without_an_end_is_given_up_early(parts: list[bytes]) -> None:
    server = Server(parts, repeats=True)
    with pytest.raises(bounded_http.BadAnswer):
        await asked(server, timeout_s=120.0)


async def test_a_server_that_does_not_answer_or_is_not_there_is_an_os_error() -> None:
    with pytest.raises(TimeoutError):
        await asked(Server([]), timeout_s=0.1)
    with pytest.raises(ConnectionError, match="without an answer"):
        await asked(Server([], ends=True))
    with pytest.raises(ConnectionError):
        await bounded_http.Client().request("GET", "http://127.0.0.1:1/", headers={}, most_bytes=1, timeout_s=20.0)


async def test_the_settings_of_encryption_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(create()) or made[-1])
    client = bounded_http.Client()
    async with serving(Server([HEAD])) as server:
        for url in (server.url, *[server.url.replace("http:", "https:")] * 2):
            with pytest.raises((OSError, bounded_http.BadAnswer)):
                await client.request("GET", url, headers={}, most_bytes=1, timeout_s=0.5)
    assert len(made) == 1


async def test_a_control_character_in_the_address_or_in_a_header_is_refused() -> None:
    async with serving(Server([HEAD + b"content-length: 0\r\n\r\n"])) as server:
        for headers in ({"a": "b\r\nc: d"}, {"a\0": "b"}):
            with pytest.raises(bounded_http.BadAnswer, match="control character"):
                await bounded_http.Client().request("GET", server.url, headers=headers, most_bytes=1, timeout_s=20.0)


async def test_few_large_bodies_arrive_at_once_and_small_ones_wait_for_none() -> None:
    size = bounded_http.SMALL_BYTES + 1
    head = HEAD + b"content-length: %d\r\n\r\n" % size
    client = bounded_http.Client()

    async def ask(server: Server) -> bounded_http.Answer:
        return await client.request("GET", server.url, headers={}, most_bytes=size, timeout_s=60.0, owner=server.url)

    async with (
        serving(Server([head + bytes(size - 1) + b"x"])) as whole,
        serving(Server([head + bytes(size), b""])) as other,
        serving(Server([HEAD + b"content-length: 2\r\n\r\nab"])) as small,
    ):
        places = [await client._places.acquire() for _ in range(bounded_http.LARGE_AT_ONCE)]
        large = [asyncio.create_task(ask(server)) for server in (whole, other)]
        assert (await ask(small)).body == b"ab"
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in large), "all places are taken"
        for _ in places:
            client._places.release()
        assert [len(answer.body) for answer in await asyncio.gather(*large)] == [size, size]
    assert not client._places.locked()
    assert not client._places_of


async def test_servers_that_stall_within_a_large_body_delay_only_those_of_their_owner() -> None:
    size = bounded_http.SMALL_BYTES + 100_000
    head = HEAD + b"content-length: %d\r\n\r\n" % size
    client = bounded_http.Client()

    async def ask(server: Server, owner: str) -> bounded_http.Answer:
        return await client.request("GET", server.url, headers={}, most_bytes=size, timeout_s=60.0, owner=owner)

    async with serving(Server([head + bytes(size - 1)])) as stalls, serving(Server([head + bytes(size)])) as honest:
        stalled = [asyncio.create_task(ask(stalls, "one")) for _ in range(3 * bounded_http.LARGE_AT_ONCE)]
        while client._places._value > bounded_http.LARGE_AT_ONCE - bounded_http.LARGE_OF_ONE:
            await asyncio.sleep(0.01)
        assert len((await ask(honest, "another")).body) == size
        assert not any(task.done() for task in stalled)
        assert client._places._value == bounded_http.LARGE_AT_ONCE - bounded_http.LARGE_OF_ONE
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
