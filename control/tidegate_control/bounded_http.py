"""Requests over HTTP to a server that may be hostile: a gateway that lies, or a model that a user of the pool names.

`aiohttp` reads interim responses and the parts of a body without a bound: twenty servers that sent nothing else stopped
the operator for 2 s, and an answer without an end has no limit of its own (decision 62). Here an answer has a limit of
bytes for its body and for what is around it, and is read in small steps. Redirects are answers like others, no proxy of
the environment is used, and a connection carries one request.
"""

import asyncio
import contextlib
import dataclasses
import functools
import ssl
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Mapping

import httptools

READ_BYTES = 16 * 1024
"""Bytes that are read in one step of the event loop."""
AROUND_BYTES = 32 * 1024
"""Of heads, interim responses, and the framing of a body, beside a quarter of the body's length."""
SMALL_BYTES = 256 * 1024
"""A body with more waits for one of the `LARGE_AT_ONCE` places."""
LARGE_AT_ONCE, LARGE_OF_ONE = 8, 2
"""Places in all, and those that the servers of one owner may have: they may keep a place for the whole of a time limit."""


class BadAnswer(ValueError):
    """The server answered, and its answer cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a server; redirects and errors are answers too."""

    status: int
    body: bytes


class Client:
    """Requests, each on a connection of its own."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(LARGE_AT_ONCE)
        self._places_of: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        most_bytes: int,
        timeout_s: float,
        owner: str = "",
    ) -> Answer:
        """The answer, whose body has at most `most_bytes`. Servers of one `owner` delay one another at most. Raises
        `BadAnswer`, and OSError, which TimeoutError is."""
        place = urllib.parse.urlsplit(url)
        encrypted = self._encryption if place.scheme == "https" else None
        port = place.port or (443 if encrypted else 80)
        async with asyncio.timeout(timeout_s), contextlib.AsyncExitStack() as stack:
            reader, writer = await asyncio.open_connection(place.hostname, port, ssl=encrypted, limit=READ_BYTES)
            stack.callback(writer.transport.abort)
            writer.write(_head(method, place, headers, body) + (body or b""))
            answer = _Arriving(most_bytes)
            async for data in _steps(reader):
                if len(answer.body) <= SMALL_BYTES < len(answer.body) + len(data):
                    await stack.enter_async_context(self._places_of.setdefault(owner, asyncio.Semaphore(LARGE_OF_ONE)))
                    await stack.enter_async_context(self._places)
                answer.feed(data)
                if answer.is_whole:
                    break
            answer.end()
            return Answer(answer.status, bytes(answer.body))

    @functools.cached_property
    def _encryption(self) -> ssl.SSLContext:
        """Takes 20 ms to make."""
        return ssl.create_default_context()


def _head(method: str, place: urllib.parse.SplitResult, headers: Mapping[str, str], body: bytes | None) -> bytes:
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    host = place.netloc.rpartition("@")[2]
    fields = {"host": host, "connection": "close", "accept": "application/json", "user-agent": "tidegate", **headers}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any(character in line for line in lines for character in "\r\n\0"):
        raise BadAnswer("the address or a header has a control character")
    return "\r\n".join([*lines, "", ""]).encode()


async def _steps(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What arrives, until the server ends its side; others have their turn after each step."""
    while data := await reader.read(READ_BYTES):
        yield data
        await asyncio.sleep(0)


class _Arriving:
    """An answer that arrives; the methods that begin with `on_` are those that the parser calls."""

    def __init__(self, most_bytes: int) -> None:
        self.body = bytearray()
        self.status = 0
        self.is_whole = False
        self._most_bytes = most_bytes
        self._received = 0
        self._has_length = False
        """Whether a header tells where the body ends; else the end of the connection does."""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Raises `BadAnswer`."""
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadAnswer("the answer changes the protocol") from None
        except httptools.HttpParserError as error:
            if not self.is_whole:
                raise BadAnswer(f"the answer is not HTTP: {error}") from None
        if len(self.body) > self._most_bytes:
            raise BadAnswer(f"the answer has more than {self._most_bytes} bytes")
        if self._received - len(self.body) > AROUND_BYTES + len(self.body) // 4:
            raise BadAnswer("the answer has more around its body than in it")

    def end(self) -> None:
        """Nothing more comes. Raises `BadAnswer` and ConnectionError."""
        if not self.status:
            raise ConnectionError("the server ended the connection without an answer")
        if self._has_length and not self.is_whole:
            raise BadAnswer("the answer is not whole")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        is_chunked = name == b"transfer-encoding" and value.lower().rpartition(b",")[2].strip() == b"chunked"
        self._has_length = self._has_length or name == b"content-length" or is_chunked

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response, which has no body
            self._has_length = False
        elif not self.is_whole:
            self.status = status

    def on_body(self, part: bytes) -> None:
        if not self.is_whole:
            self.body += part

    def on_message_complete(self) -> None:
        self.is_whole = self.is_whole or self.status != 0
