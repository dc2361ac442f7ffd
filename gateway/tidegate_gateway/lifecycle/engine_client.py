"""Talks to one vLLM engine: one request, and its answer as bytes that are read on the way but never rebuilt.

A `Reply` exists once the engine has shown that it works on the call: its first event for a stream, the whole answer
otherwise. Until then every failure is an `EngineTrouble`, and another engine may be tried. Closing a reply early closes the
connection, which tells vLLM that the client is gone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import aiohttp
import orjson

from tidegate_gateway import gateway_settings
from tidegate_gateway.openai import endpoint, error_table, event_stream, parsed_request

KEEPALIVE_S = 3.0
"""Idle connections are closed before vLLM's server does (5 s), so that no call is written to a closing one."""

REST_S = 0.2
"""For an engine to end its answer after the end marker."""


class Reply:
    """An answer that has begun."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        *,
        first: bytes = b"",
        tap: event_stream.Tap | None = None,
        meter: event_stream.Meter,
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
        """The next whole events of a stream; b"" at its end. Raises `EngineTrouble` if it ends without its end marker."""
        tap, content = self._tap, self._response.content
        if tap is None or self.meter.done:
            return b""
        while True:
            try:
                data = await content.readany()
                block = tap.feed(data)
            except (aiohttp.ClientError, OSError) as error:
                raise error_table.EngineTrouble("the engine's stream broke off", failure="gone") from error
            except event_stream.NotEvents as error:
                raise error_table.EngineTrouble(f"the engine's stream is garbled: {error}") from error
            if block or self.meter.done:
                return block
            if not data:
                raise error_table.EngineTrouble("the engine's stream ended too early")

    async def rest(self) -> None:
        """Waits until the engine ends its answer after the end marker, so that the connection can carry another call."""
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


class EngineClient:
    """All engines, over one connection pool."""

    def __init__(self, session: aiohttp.ClientSession, *, limits: gateway_settings.Limits) -> None:
        self._session = session
        self._limits = limits

    async def open(
        self, url: str, request: parsed_request.ParsedRequest, body: bytes, headers: Mapping[str, str]
    ) -> Reply:
        """Sends a call to the engine at `url` and waits until its answer has begun. Raises `EngineTrouble`."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.post(
                url + request.endpoint.path, data=body, headers=headers, allow_redirects=False
            )
            return await self._begun(response, request)
        except (aiohttp.ClientError, OSError) as error:
            _discard(response)
            broken = f"the engine failed before its answer began ({type(error).__name__})"
            raise error_table.EngineTrouble(broken, failure="gone") from error
        except BaseException:
            _discard(response)
            raise

    async def _begun(self, response: aiohttp.ClientResponse, request: parsed_request.ParsedRequest) -> Reply:
        if response.status == 503:
            raise error_table.EngineTrouble("the engine's own queue is full", failure="busy")
        if response.status >= 500:
            raise error_table.EngineTrouble(f"the engine answered {response.status}")
        dialect, size = request.endpoint.stream, request.size
        meter = event_stream.Meter(endpoint=request.endpoint, choices=size.choices, max_tokens=size.max_tokens)
        if response.status != 200 or not request.stream or dialect is None:
            return await self._whole(response, request.endpoint, meter)
        if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
            raise error_table.EngineTrouble("the engine did not answer a streamed call with a stream")
        tap = event_stream.Tap(dialect, meter, wants_usage=request.wants_usage)
        reply = Reply(response, tap=tap, meter=meter)
        reply.first = await reply.next_block()
        if meter.failed:
            raise error_table.EngineTrouble("the engine began its answer with an error")
        return reply

    async def _whole(
        self, response: aiohttp.ClientResponse, kind: endpoint.Endpoint, meter: event_stream.Meter
    ) -> Reply:
        chunks: list[bytes] = []
        size = 0
        while chunk := await response.content.readany():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._limits.answer_bytes:
                too_large = f"the engine's answer is larger than {self._limits.answer_bytes} bytes"
                raise error_table.EngineTrouble(too_large)
        content = b"".join(chunks)
        meter.done = True
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise error_table.EngineTrouble("the engine's answer is not JSON") from error
        if not isinstance(answer, dict) or (response.status == 200 and not kind.is_answer(answer)):
            raise error_table.EngineTrouble(f"the engine's answer is not an answer of {kind.path}")
        meter.on_usage(answer.get("usage"))
        return Reply(response, first=content, meter=meter)


def _discard(response: aiohttp.ClientResponse | None) -> None:
    if response is not None:
        response.close()


@contextlib.asynccontextmanager
async def connected(timeouts: gateway_settings.Timeouts) -> AsyncIterator[aiohttp.ClientSession]:
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
