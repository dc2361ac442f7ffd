"""A wire-level fake engine for tests of the gateway: it has the part of vLLM's API that the gateway uses, and
misbehaves on demand.

The simulator is `tidegate_sim`. This engine has no batches and no accelerator, only tokens at a pace.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

MOST_BODY_BYTES = 64 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """How the engine behaves, and which requests it got; tests change the behaviour while the engine runs."""

    model: str = "fake"
    adapters: tuple[str, ...] = ()
    """Names of further models that it lists."""
    context_tokens: int | None = None
    """The length of the context that it tells. It rejects a longer prompt: two characters of a message are a token."""
    tokens: int = 4
    prompt_tokens: int = 7
    padding: str = ""
    """What each token of a stream has besides its number."""
    token_s: float = 0.0
    first_s: float | tuple[float, float] = 0.0
    """Seconds before the first token; two numbers: each call draws from between them."""
    status: int = 200
    """The status of completions."""
    fails: tuple[str, int] | None = None
    """The status of completions whose bodies have this text."""
    hang: bool = False
    """Completions are accepted and never answered."""
    hang_after: int | None = None
    """Streams stop after so many tokens, and stay open."""
    break_after: int | None = None
    """Streams break off after so many tokens."""
    tool: str | None = None
    """The tool that answers invoke, where the endpoint has tools."""
    garbage: bytes | None = None
    """Sent in place of any answer."""
    metrics: bytes | None = None
    """In place of the true metrics page."""
    healthy: bool = True
    deaf: bool = False
    """/health is accepted and never answered."""
    running: int = 0
    generated: int = 0
    served: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    """Connections that calls came on."""
    transports: set[Any] = field(default_factory=set)
    """Of the calls that run."""
    url: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.peers.add(request.transport.get_extra_info("peername") if request.transport is not None else None)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.running += 1
        self.transports.add(request.transport)
        try:
            return await self._answer(request, body)
        finally:
            self.running -= 1
            self.transports.discard(request.transport)

    def abort(self) -> None:
        """Resets the connections of the calls that run, as the kernel does for a killed process."""
        for transport in [*self.transports]:
            transport.abort()

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.hang:
            await asyncio.sleep(3600)
        text, fails = self.fails or ("", self.status)
        if (status := fails if text in str(body) else self.status) != 200:
            error = {"error": {"message": "as set by the test", "type": "test", "param": None, "code": status}}
            return web.json_response(error, status=status)
        if self.context_tokens is not None and _characters(body) > 2 * self.context_tokens:
            error = {"error": {"message": "longer than the context", "type": "test", "param": None, "code": 400}}
            return web.json_response(error, status=400)
        if self.garbage is not None:
            kind = "text/event-stream" if body.get("stream") else "application/json"
            return web.Response(body=self.garbage, content_type=kind)
        await asyncio.sleep(random.uniform(*self.first_s) if isinstance(self.first_s, tuple) else self.first_s)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or self.tokens
        count = min(self.tokens, most)
        prompt = self.prompt_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        chat = request.path.endswith("/chat/completions")
        if body.get("stream"):
            return await self._stream(request, body, chat, count, usage)
        for _ in range(count):
            await asyncio.sleep(self.token_s)
            self.generated += 1
        self.served += 1
        text = "".join(f"w{i} " for i in range(count))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        said = {"role": "assistant", "content": text, **self._invoked(whole=True)}
        choice |= {"message": said} if chat else {"text": text}
        return web.json_response(self._object(body, chat, [choice], usage))

    async def _stream(
        self, request: web.Request, body: dict[str, Any], chat: bool, count: int, usage: dict[str, int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for i in range(count):
            if i == self.break_after:
                if request.transport is not None:
                    request.transport.abort()
                return response
            if i == self.hang_after:
                await asyncio.sleep(3600)
            finish = "length" if i == count - 1 else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            text = f"w{i} {self.padding}"
            said = {"role": "assistant", "content": text, **(self._invoked(whole=False) if i == 1 else {})}
            choice |= {"delta": said} if chat else {"text": text}
            await response.write(b"data: " + orjson.dumps(self._object(body, chat, [choice], None)) + b"\n\n")
            await asyncio.sleep(self.token_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + orjson.dumps(self._object(body, chat, [], usage)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        self.served += 1
        return response

    def _invoked(self, *, whole: bool) -> dict[str, Any]:
        """The part of a message, or of an event of a stream, that invokes the tool."""
        if self.tool is None:
            return {"tool_calls": []} if whole else {}
        place = {} if whole else {"index": 0}
        function = {"name": self.tool, "arguments": "{}"}
        return {"tool_calls": [{**place, "id": "call_1", "type": "function", "function": function}]}

    def _object(self, body: dict[str, Any], chat: bool, choices: list[Any], usage: Any) -> dict[str, Any]:
        kind = ("chat.completion" if chat else "text_completion") + (".chunk" if body.get("stream") and chat else "")
        return {
            "id": "cmpl-1",
            "object": kind,
            "created": 1,
            "model": body["model"],
            "choices": choices,
            **({"usage": usage} if usage is not None else {}),
        }

    async def embed(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        given = body["input"]
        count = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
        self.served += 1
        return web.json_response(
            {
                "object": "list",
                "model": body["model"],
                "data": [{"object": "embedding", "index": i, "embedding": [0.5, -0.5]} for i in range(count)],
                "usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens},
            }
        )

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        count = min(self.tokens, body.get("max_output_tokens") or self.tokens)
        text = "".join(f"w{i} " for i in range(count))
        content = {"type": "output_text", "text": text, "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
        invoked = [{"id": "f", "type": "function_call", "call_id": "c", "name": self.tool, "arguments": "{}"}]
        whole = {
            "id": "r",
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "model": body["model"],
            "output": [message, *(invoked if self.tool is not None else ())],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": self.prompt_tokens,
                "output_tokens": count,
                "total_tokens": self.prompt_tokens + count,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }
        self.served += 1
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        created = {"response": {**whole, "status": "in_progress", "output": [], "usage": None}}
        where: dict[str, Any] = {"item_id": "m", "output_index": 0, "content_index": 0, "logprobs": []}
        deltas = [{**where, "delta": f"w{i} "} for i in range(count)]
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", created),
            *(("response.output_text.delta", delta) for delta in deltas),
            ("response.completed", {"response": whole}),
        ]
        for number, (name, fields) in enumerate(events):
            if number - 1 == self.break_after:
                if request.transport is not None:
                    request.transport.abort()
                return response
            event = orjson.dumps({"type": name, "sequence_number": number, **fields})
            await response.write(b"event: " + name.encode() + b"\ndata: " + event + b"\n\n")
            await asyncio.sleep(self.token_s)
        await response.write_eof()
        return response

    async def health(self, request: web.Request) -> web.StreamResponse:
        if self.deaf:
            await asyncio.sleep(3600)
        return web.Response(status=200 if self.healthy else 503)

    async def models(self, request: web.Request) -> web.StreamResponse:
        names = (self.model, *self.adapters)
        context = {} if self.context_tokens is None else {"max_model_len": self.context_tokens}
        return web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model", **context} for name in names]}
        )

    async def show_metrics(self, request: web.Request) -> web.StreamResponse:
        page = f'vllm:num_requests_running{{engine="0"}} {self.running}\nvllm:num_requests_waiting{{engine="0"}} 0\n'
        page += f'vllm:generation_tokens_total{{engine="0"}} {self.generated}\n'
        return web.Response(body=page.encode() if self.metrics is None else self.metrics)


def _characters(body: dict[str, Any]) -> int:
    return sum(len(message["content"]) for message in body.get("messages") or ())


@contextlib.asynccontextmanager
async def engine(
    *, host: str = "127.0.0.1", kernel_bytes: int | None = None, **behaviour: Any
) -> AsyncIterator[FakeEngine]:
    """A fake engine on a loopback port. `kernel_bytes` bounds what the kernel keeps of a stream that nobody reads."""
    fake = FakeEngine(**behaviour)
    application = web.Application(client_max_size=MOST_BODY_BYTES)
    application.router.add_post("/v1/chat/completions", fake.complete)
    application.router.add_post("/v1/completions", fake.complete)
    application.router.add_post("/v1/responses", fake.respond)
    application.router.add_post("/v1/embeddings", fake.embed)
    application.router.add_get("/v1/models", fake.models)
    application.router.add_get("/health", fake.health)
    application.router.add_get("/metrics", fake.show_metrics)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=1024)
        if kernel_bytes is not None:  # its connections inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, kernel_bytes)
        await web.SockSite(runner, listening, backlog=1024).start()
        fake.url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        yield fake
    finally:
        for connection in [] if runner.server is None else runner.server.connections:
            if connection.transport is not None and connection.transport.get_write_buffer_size():
                connection.transport.abort()  # its client does not read, so it would never close
        await runner.cleanup()
