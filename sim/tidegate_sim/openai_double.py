"""A simulated engine with vLLM's HTTP API and metric names.

The gateway, the operator and the tests use it like any other engine; its answers say that they are simulated.
`sim_request` reads requests and `realtime` paces the tokens; this module only translates.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from tidegate_engine import compat
from tidegate_policy.model import Call
from tidegate_sim import embeddings_double, realtime, responses_double, sim_request

VERSION = f"{compat.TESTED[-1]}.0+tidegate.sim"
_FILLER = (
    "the engine is simulated so these words carry no meaning only timing each one took as long as the cost profile says"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The names under which the engine presents itself."""

    model: str
    profile: str
    adapters: tuple[str, ...] = ()
    """Further models that it serves, at the same pace."""

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.adapters)


class SimulatedEngine:
    """The aiohttp application of one engine. `RealtimeEngine.run` must run beside it."""

    def __init__(self, engine: realtime.RealtimeEngine, identity: Identity) -> None:
        self.engine = engine
        self.identity = identity
        self._metrics = _Metrics(identity.model, engine)
        self.app = web.Application(client_max_size=64 * 2**20)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/responses", self._response),
                web.post("/v1/embeddings", self._embeddings),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._exposition),
            ]
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _response(self, request: web.Request) -> web.StreamResponse:
        try:
            body = responses_double.as_chat(await request.read())
            parsed = self._fitted(sim_request.parse(body, chat=True, models=self.identity.models))
        except sim_request.BadRequest as error:
            return _rejection(error)
        head = {**self._head(request, parsed), "id": f"resp_{uuid.uuid4().hex}"}
        words = self._words(parsed)
        if not parsed.stream:
            text = "".join([word async for _, word in words])
            return web.json_response(body=orjson.dumps(responses_double.response(head, parsed, text)))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        with contextlib.suppress(ConnectionResetError):  # the client closed the connection
            await response.prepare(request)
            async for event in responses_double.events(head, parsed, words):
                await response.write(event)
        return response

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        try:
            parsed = embeddings_double.parse(await request.read(), models=self.identity.models)
            self._room(parsed.calls, 1)
        except sim_request.BadRequest as error:
            return _rejection(error)
        async for index, _ in self.engine.generate(parsed.calls, 1, parsed.contents):
            self._metrics.on_prompt(parsed.calls[index])
        return web.json_response(body=orjson.dumps(embeddings_double.answer(parsed)))

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            parsed = self._fitted(sim_request.parse(await request.read(), chat=chat, models=self.identity.models))
        except sim_request.BadRequest as error:
            return _rejection(error)
        head = self._head(request, parsed)
        words = self._words(parsed)
        if not parsed.stream:
            texts = [""] * len(parsed.calls)
            async for index, word in words:
                texts[index] += word
            return web.json_response(body=orjson.dumps({**head, **_whole(parsed, texts)}))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        with contextlib.suppress(ConnectionResetError):  # the client closed the connection
            await response.prepare(request)
            async for chunk in _events(parsed, head, words):
                await response.write(b"data: " + chunk + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    def _fitted(self, parsed: sim_request.SimRequest) -> sim_request.SimRequest:
        """The request; an answer without a token limit ends where the context does. Raises `BadRequest`."""
        room = self._room(parsed.calls, parsed.output_tokens if parsed.limited else 1)
        return replace(parsed, output_tokens=min(parsed.output_tokens, room))

    def _room(self, calls: Sequence[Call], output_tokens: int) -> int:
        """Tokens that each answer may have. Raises `BadRequest` if these are fewer than `output_tokens`."""
        context, prompt = self.engine.context, max(call.prompt_tokens for call in calls)
        if prompt + output_tokens > context:
            raise sim_request.BadRequest(
                f"This model's maximum context length is {context} tokens. However, you requested {output_tokens} output "
                f"tokens and your prompt contains {prompt} input tokens.",
                param="prompt",
            )
        return context - prompt

    def _head(self, request: web.Request, parsed: sim_request.SimRequest) -> dict[str, object]:
        name = "chatcmpl" if parsed.chat else "cmpl"
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        kind = ("chat.completion.chunk" if parsed.stream else "chat.completion") if parsed.chat else "text_completion"
        return {
            "id": f"{name}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": parsed.model,
        }

    async def _words(self, parsed: sim_request.SimRequest) -> AsyncIterator[tuple[int, str]]:
        """Each word at its time, with the index of its choice."""
        text = f"[simulated {self.identity.profile} engine] {_FILLER}".split()
        start = asyncio.get_running_loop().time()
        async for index, done in self.engine.generate(parsed.calls, parsed.output_tokens, parsed.contents):
            self._metrics.on_token(parsed.calls[index], done, asyncio.get_running_loop().time() - start)
            if parsed.stub is not None:
                yield index, parsed.stub.pieces[done - 1]
                continue
            word = text[(done - 1) % len(text)]
            yield index, word if done == 1 else f" {word}"

    async def _models(self, _: web.Request) -> web.Response:
        common = {"object": "model", "owned_by": "tidegate-sim", "max_model_len": self.engine.context}
        return web.json_response({"object": "list", "data": [{"id": name, **common} for name in self.identity.models]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION, "simulated": self.identity.profile})

    async def _exposition(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"content-type": exposition.CONTENT_TYPE_LATEST})


class _Metrics:
    """The vLLM metrics that gateways read."""

    def __init__(self, model: str, engine: realtime.RealtimeEngine) -> None:
        self._registry = CollectorRegistry()
        names = {"labelnames": ("model_name", "engine"), "registry": self._registry}
        label = {"model_name": model, "engine": "0"}
        levels = {
            "vllm:num_requests_running": lambda: engine.running,
            "vllm:num_requests_waiting": lambda: engine.waiting,
            "vllm:kv_cache_usage_perc": lambda: engine.kv_usage,
        }
        for name, read in levels.items():
            Gauge(name, name, **names).labels(**label).set_function(read)  # type: ignore[arg-type]
        self._engine = engine
        self._looked_up = Counter("vllm:prefix_cache_queries", "Prompt tokens.", **names).labels(**label)  # type: ignore[arg-type]
        self._cached = Counter("vllm:prefix_cache_hits", "Cached tokens.", **names).labels(**label)  # type: ignore[arg-type]
        self._told = (0, 0)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", **names).labels(**label)  # type: ignore[arg-type]
        self._tokens = Counter("vllm:generation_tokens", "Tokens.", **names).labels(**label)  # type: ignore[arg-type]
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "TTFT.", **names).labels(**label)  # type: ignore[arg-type]

    def on_token(self, call: Call, done: int, elapsed_s: float) -> None:
        self._tokens.inc()
        if done == 1:
            self.on_prompt(call)
            self._ttft.observe(elapsed_s)

    def on_prompt(self, call: Call) -> None:
        self._prompt.inc(call.prompt_tokens)

    def expose(self) -> bytes:
        now = self._engine.looked_up_tokens, self._engine.cached_tokens
        for counter, value, told in zip((self._looked_up, self._cached), now, self._told, strict=True):
            counter.inc(value - told)
        self._told = now
        return exposition.generate_latest(self._registry)


def _whole(parsed: sim_request.SimRequest, texts: list[str]) -> dict[str, object]:
    said: list[dict[str, object]] = [
        {"message": {"role": "assistant", "content": None, **_said(parsed, text, index)}}
        if parsed.chat
        else {"text": text}
        for index, text in enumerate(texts)
    ]
    return {
        "choices": [_choice(index, words, _reason(parsed)) for index, words in enumerate(said)],
        "usage": _usage(parsed),
    }


async def _events(
    parsed: sim_request.SimRequest, head: dict[str, object], words: AsyncIterator[tuple[int, str]]
) -> AsyncIterator[bytes]:
    """The events of a stream in vLLM's form: choices alternate, and each choice ends with its own reason. Nothing comes
    before the first token, not even the roles."""
    left = [parsed.output_tokens] * len(parsed.calls)
    begun = not parsed.chat
    async for index, word in words:
        for each in range(0 if begun else len(left)):
            yield _event(head, _choice(each, {"delta": {"role": "assistant", "content": ""}}, None))
        begun = True
        first = left[index] == parsed.output_tokens
        delta: dict[str, object] = {"delta": _said(parsed, word, index, first=first)} if parsed.chat else {"text": word}
        yield _event(head, _choice(index, delta, None))
        left[index] -= 1
        if not left[index]:
            yield _event(head, _choice(index, {"delta": {}} if parsed.chat else {"text": ""}, _reason(parsed)))
    if parsed.include_usage:
        yield orjson.dumps({**head, "choices": [], "usage": _usage(parsed)})


def _said(parsed: sim_request.SimRequest, text: str, index: int, *, first: bool = True) -> dict[str, object]:
    """A text in a message or a delta, or as the arguments of a tool; the first delta of a tool's call names it."""
    if parsed.stub is None or parsed.stub.tool is None:
        return {"content": text}
    named = {"id": f"call_{index}", "type": "function"} if first else {}
    function = {"name": parsed.stub.tool, "arguments": text} if first else {"arguments": text}
    place = {"index": 0} if parsed.stream else {}
    return {"tool_calls": [{**place, **named, "function": function}]}


def _event(head: dict[str, object], choice: dict[str, object]) -> bytes:
    return orjson.dumps({**head, "choices": [choice]})


def _choice(index: int, said: dict[str, object], finish_reason: str | None) -> dict[str, object]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}


def _reason(parsed: sim_request.SimRequest) -> str:
    if parsed.stub is not None and parsed.stub.tool is not None and not parsed.limited:
        return "tool_calls"
    return "length" if parsed.limited else "stop"


def _usage(parsed: sim_request.SimRequest) -> dict[str, int]:
    prompt, output = parsed.prompt_tokens, parsed.output_tokens * len(parsed.calls)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _rejection(error: sim_request.BadRequest) -> web.Response:
    body = {"message": str(error), "type": "BadRequestError", "param": error.param, "code": 400}
    return web.json_response({"error": body}, status=400)
