"""Talks to one vLLM engine: one request, and its answer as bytes that are read on the way but never rebuilt.

A `Reply` exists once the engine has shown that it works on the call: its first event for a stream, the whole answer
otherwise. Until then every failure is an `EngineTrouble`, and `router` may try another engine. Closing a reply early
closes the connection, which is how vLLM learns that nobody listens.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import aiohttp
import orjson

from tidegate_gateway import errors, settings, sse

KEEPALIVE_S = 3.0
"""Idle connections are closed before vLLM's server does (5 s), so that no call is written to a closing one."""

REST_S = 0.2
"""For an engine to end its answer after [DONE]."""


class Busy(errors.EngineTrouble):
    """The engine's own queue is full: another engine may have room, and nothing is wrong with this one."""


class Gone(errors.EngineTrouble):
    """The connection failed: the engine works on the call no longer, so another one may have it at no cost to this one."""


class Reply:
    """An answer that has begun."""

    def __init__(
        self, response: aiohttp.ClientResponse, *, first: bytes, tap: sse.Tap | None, meter: sse.Meter
    ) -> None:
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.first = first
        self.meter = meter
        self._response = response
        self._tap = tap

    @property
    def streamed(self) -> bool:
        return self._tap is not None

    async def next_block(self) -> bytes:
        """The next whole events of a stream; b"" at its end. Raises `EngineTrouble` if it ends without its [DONE]."""
        if self._tap is None or self.meter.done:
            return b""
        return await _block(self._response, self._tap)

    async def rest(self) -> None:
        """Reads the nothing that follows [DONE], so that the connection can carry another call."""
        if self.meter.done and not self._response.content.at_eof():
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(REST_S):
                    await self._response.content.readany()

    def close(self) -> None:
        """Ends the call in the engine unless it is over; a finished connection goes back to its pool."""
        if self._tap is None or self.meter.done:
            self._response.release()
        else:
            self._response.close()


class Engine(Protocol):
    """The seam to an engine's HTTP side; `Client` implements it."""

    async def open(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str], *, wants_usage: bool | None
    ) -> Reply:
        """Sends a call. `wants_usage` is None for an answer that is not streamed. Raises `EngineTrouble`, `Busy`."""


class Client:
    """All engines, over one connection pool."""

    def __init__(self, session: aiohttp.ClientSession, *, limits: settings.Limits) -> None:
        self._session = session
        self._limits = limits

    async def open(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str], *, wants_usage: bool | None
    ) -> Reply:
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.post(url + path, data=body, headers=headers, allow_redirects=False)
            return await self._begun(response, wants_usage)
        except (aiohttp.ClientError, OSError) as error:
            _discard(response)
            raise Gone(f"the engine failed before its answer began ({type(error).__name__})") from error
        except BaseException:
            _discard(response)
            raise

    async def _begun(self, response: aiohttp.ClientResponse, wants_usage: bool | None) -> Reply:
        if response.status == 503:
            raise Busy("the engine's own queue is full")
        if response.status >= 500:
            raise errors.EngineTrouble(f"the engine answered {response.status}")
        if response.status != 200 or wants_usage is None:
            return await self._whole(response)
        if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
            raise errors.EngineTrouble("the engine answered a stream with something else")
        tap = sse.Tap(wants_usage=wants_usage)
        return Reply(response, first=await _block(response, tap), tap=tap, meter=tap.meter)

    async def _whole(self, response: aiohttp.ClientResponse) -> Reply:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > self._limits.answer_bytes:
                raise errors.EngineTrouble(f"the engine's answer is larger than {self._limits.answer_bytes} bytes")
        meter = sse.Meter(done=True)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise errors.EngineTrouble("the engine's answer is not JSON") from error
        if not isinstance(answer, dict) or (response.status == 200 and not isinstance(answer.get("choices"), list)):
            raise errors.EngineTrouble("the engine's answer is not an OpenAI answer")
        meter.on_usage(answer.get("usage"))
        return Reply(response, first=bytes(content), tap=None, meter=meter)


async def _block(response: aiohttp.ClientResponse, tap: sse.Tap) -> bytes:
    while True:
        try:
            data = await response.content.readany()
            block = tap.feed(data)
        except (aiohttp.ClientError, OSError) as error:
            raise Gone("the engine's stream broke off") from error
        except sse.NotEvents as error:
            raise errors.EngineTrouble(f"the engine's stream is garbled: {error}") from error
        if block or tap.meter.done:
            return block
        if not data:
            raise errors.EngineTrouble("the engine's stream ended too early")


def _discard(response: aiohttp.ClientResponse | None) -> None:
    if response is not None:
        response.close()


@contextlib.asynccontextmanager
async def connected(timeouts: settings.Timeouts) -> AsyncIterator[aiohttp.ClientSession]:
    """The connection pool to all engines; closed at the end."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        read_bufsize=256 * 1024,
    ) as session:
        yield session
    await asyncio.sleep(0)  # lets closed transports finish before the loop ends
