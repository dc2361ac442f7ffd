"""Talks to one vLLM engine: one request, and its answer as bytes that are read on the way but never rebuilt.

A `Reply` exists once the engine has shown that it works on the call: its first event for a stream, the whole answer
otherwise. Until then every failure is an `EngineTrouble`, and another engine may be tried. Closing a reply early closes the
connection, which tells vLLM that the client is gone.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from tidegate_gateway import gateway_settings, http_client
from tidegate_gateway.openai import bounded_json, endpoint, error_table, event_stream, parsed_request
from tidegate_policy.model import DropReason

REST_S = 0.2
"""For an engine to end its answer after the end marker."""
UNAUTHORIZED = (401, 403, 407)
"""The engine wants credentials, which no client of the gateway can give."""
ABSENT = 501
"""vLLM's answer where its model does not have the endpoint: as a 404, it is no failure of the engine."""
TEMPLATE_TOKENS = 2048
"""Tokens that a chat template adds to a prompt at most. Every other token of a text has a byte of the body at least."""
MEDIA_TOKENS = 32_768
"""Tokens of an image or a sound at most. At an address it has few bytes and many tokens."""
LONGEST_BEGINNING = 4 * 2**20
"""Bytes of a stream before its first token. `response.created` repeats fields of the request."""
ANSWER_BYTES, TOKEN_BYTES = 256 * 1024, 256
"""No whole answer is larger than that and so many bytes for each of its tokens, unless it has more than their text."""
_MORE_THAN_TEXT = frozenset(
    {"logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids", "echo"}
)
LARGE_BYTES = 1024 * 1024
"""Of an answer that is not streamed; the bytes of larger ones are bounded in sum."""
SMALL_BYTES = 4096
"""Parts of such an answer that have no more together are kept as one: two bytes take 35 of memory by themselves."""
NO_JSON = "the engine's answer is not JSON that the gateway takes"


class Reply:
    """An answer that has begun."""

    def __init__(
        self,
        connection: http_client.Connection,
        *,
        first: bytes = b"",
        tap: event_stream.Tap | None = None,
        meter: event_stream.Meter,
    ) -> None:
        self.status = connection.status
        self.content_type = connection.content_type or "application/json"
        self.first = first
        self.meter = meter
        self._connection = connection
        self._tap = tap
        self._closed = False

    def take_first(self) -> bytes:
        """What has come with the first token. It is kept no longer, because the stream may be long and its client slow."""
        first, self.first = self.first, b""
        return first

    @property
    def rejects(self) -> bool:
        """The engine says that the request is at fault."""
        return self.status != 200

    @property
    def streamed(self) -> bool:
        return self._tap is not None

    async def next_block(self) -> bytes:
        """The next whole events of a stream; b"" at its end. Raises `EngineTrouble` if it ends without its end marker."""
        tap = self._tap
        if tap is None or self.meter.done:
            return b""
        while True:
            try:
                data = await self._connection.read()
                block = tap.feed(data)
            except OSError as error:
                raise error_table.EngineTrouble("the engine's stream broke off", failure="gone") from error
            except event_stream.NotEvents as error:
                raise error_table.EngineTrouble(f"the engine's stream is garbled: {error}") from error
            if block or self.meter.done:
                return block
            if not data:
                raise error_table.EngineTrouble("the engine's stream ended too early")

    async def rest(self) -> None:
        """Waits until the engine ends its answer after the end marker, so that the connection can carry another call."""
        if self.meter.done and not self._closed and not self._connection.ended:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(REST_S):
                    await self._connection.read()

    def close(self) -> None:
        """Ends the call in the engine unless it is over; a finished connection goes back to its pool, once."""
        if not self._closed:
            self._closed = True
            self._connection.release()


class EngineClient:
    """All engines."""

    def __init__(self, connections: http_client.Connections, *, limits: gateway_settings.Limits) -> None:
        self._connections = connections
        self._limits = limits
        self._large_bytes = 0
        """Of the answers beyond `LARGE_BYTES` that are being read."""

    async def open(
        self, url: str, request: parsed_request.ParsedRequest, body: bytes, headers: Mapping[str, str]
    ) -> Reply:
        """Sends a call to the engine at `url` and waits until its answer has begun. Raises `EngineTrouble`."""
        origin, start = http_client.request_start("POST", url.rstrip("/") + request.endpoint.path)
        own = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        connection: http_client.Connection | None = None
        try:
            connection = await self._connections.get(origin)
            await connection.send(b"%s%sContent-Length: %d\r\n\r\n%s" % (start, own.encode("latin-1"), len(body), body))
            return await self._begun(connection, request, len(body))
        except OSError as error:
            _discard(connection)
            broken = f"the engine failed before its answer began ({error})"
            raise error_table.EngineTrouble(broken, failure="gone") from error
        except BaseException:
            _discard(connection)
            raise

    async def _begun(
        self, connection: http_client.Connection, request: parsed_request.ParsedRequest, body_bytes: int
    ) -> Reply:
        if connection.status in (429, 503):
            raise error_table.EngineTrouble("the engine's own queue is full", failure="busy")
        if is_failure(connection.status):
            raise error_table.EngineTrouble(f"the engine answered {connection.status}")
        dialect, size = request.endpoint.stream, request.size
        meter = event_stream.Meter(
            endpoint=request.endpoint,
            choices=size.choices,
            max_tokens=size.max_tokens,
            most_prompt_tokens=body_bytes + TEMPLATE_TOKENS + MEDIA_TOKENS * size.media,
            offers_tools=request.offers_tools,
        )
        if connection.status != 200 or not request.stream or dialect is None:
            return await self._whole(connection, request, meter)
        if not connection.content_type.startswith("text/event-stream"):
            raise error_table.EngineTrouble("the engine did not answer a streamed call with a stream")
        tap = event_stream.Tap(dialect, meter, wants_usage=request.wants_usage)
        reply = Reply(connection, tap=tap, meter=meter)
        blocks = [await reply.next_block()]
        left = LONGEST_BEGINNING
        while dialect.named and not (meter.tokens or meter.done or meter.failed):
            left -= len(blocks[-1])  # `response.created` comes before the prompt is computed
            if left < 0:
                raise error_table.EngineTrouble("the engine's stream is garbled: too much before the first token")
            blocks.append(await reply.next_block())
        reply.first = b"".join(blocks)
        if meter.failed:
            raise error_table.EngineTrouble("the engine began its answer with an error")
        if meter.done and not (meter.tokens or dialect.named):
            raise error_table.EngineTrouble("the engine ended its answer without a choice in it")
        return reply

    def _most_bytes(self, request: parsed_request.ParsedRequest) -> int:
        """The size of the largest answer to a request."""
        size, most = request.size, self._limits.answer_bytes
        told = request.raw is None and _MORE_THAN_TEXT.isdisjoint(request.body)
        if size.max_tokens is None or request.endpoint.output_usage is None or not told:
            return most
        return min(most, ANSWER_BYTES + TOKEN_BYTES * size.choices * size.max_tokens)

    async def _whole(
        self, connection: http_client.Connection, request: parsed_request.ParsedRequest, meter: event_stream.Meter
    ) -> Reply:
        most = self._most_bytes(request)
        chunks: list[bytes] = []
        size = counted = 0
        try:
            while chunk := await connection.read():
                if chunks and len(chunks[-1]) + len(chunk) <= SMALL_BYTES:
                    chunks[-1] += chunk
                else:
                    chunks.append(chunk)
                size += len(chunk)
                if size > most:
                    too_large = f"the engine's answer is larger than {most} bytes"
                    raise error_table.EngineTrouble(too_large)
                if size > counted + LARGE_BYTES:
                    self._large_bytes += size - counted
                    counted = size
                    if self._large_bytes > self._limits.bodies_bytes:
                        raise error_table.Shed(DropReason.SATURATED)
            content = b"".join(chunks)
            chunks.clear()
            return self._read(connection, content, request.endpoint, meter)
        finally:
            self._large_bytes -= counted

    def _read(
        self,
        connection: http_client.Connection,
        content: bytes,
        kind: endpoint.Endpoint,
        meter: event_stream.Meter,
    ) -> Reply:
        meter.done = True
        if connection.status != 200:
            return Reply(connection, first=content, meter=meter)  # the request is at fault, whatever the engine says
        try:
            answer = bounded_json.of_engine(content)
        except bounded_json.TooManyParts:  # it is passed on as it is
            if not (content[:64].lstrip().startswith(b"{") and content[-64:].rstrip().endswith(b"}")):
                raise error_table.EngineTrouble(NO_JSON) from None
            meter.on_usage(bounded_json.usage_of(content))
            return Reply(connection, first=content, meter=meter)
        except ValueError as error:
            raise error_table.EngineTrouble(NO_JSON) from error
        if not isinstance(answer, dict) or not kind.is_answer(answer):
            raise error_table.EngineTrouble(f"the engine's answer is not an answer of {kind.path}")
        meter.on_usage(answer.get("usage"))
        if meter.offers_tools:
            meter.tool = kind.invoked_tool(answer)
        return Reply(connection, first=content, meter=meter)


def is_failure(status: int) -> bool:
    """Whether an answer with this status is the engine's fault, and not that of the call."""
    blames_call = (400 <= status < 500 and status not in UNAUTHORIZED) or status == ABSENT
    return status != 200 and not blames_call


def _discard(connection: http_client.Connection | None) -> None:
    if connection is not None:
        connection.close()
