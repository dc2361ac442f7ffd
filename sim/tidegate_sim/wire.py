"""A simulated engine behind vLLM's face: its HTTP API, its metric names, and EngineControl.

For the gateway, the operator and the tests it is an engine like any other; its answers say that they are simulated.
`realtime` paces the tokens; this module only translates.
"""

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from tidegate_policy import labels
from tidegate_policy.model import Call, CallId
from tidegate_sim import realtime

DEFAULT_OUTPUT_TOKENS = 48
CHARACTERS_A_TOKEN = 4
VERSION = "0.32.0+tidegate.sim"
_FILLER = (
    "the engine is simulated so these words carry no meaning only timing each one took as long as the cost profile says"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the engine says it is."""

    model: str
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """A validated request body."""

    call: Call
    output_tokens: int
    chat: bool
    stream: bool
    include_usage: bool
    limited: bool
    """True when `max_tokens` ended the answer."""


class BadRequest(ValueError):
    """The body is not a request that vLLM would take."""


class SimulatedEngine:
    """The aiohttp application of one engine; `run` must run beside it."""

    def __init__(self, engine: realtime.RealtimeEngine, identity: Identity) -> None:
        self.engine = engine
        self.identity = identity
        self._metrics = _Metrics(identity.model, engine)
        self.app = web.Application(client_max_size=64 * 2**20)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
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

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            ask = _parse(await request.read(), chat=chat, model=self.identity.model)
        except BadRequest as error:
            return _error(400, str(error))
        head = self._head(request, ask)
        words = self._words(ask)
        if not ask.stream:
            text = "".join([word async for word in words])
            return web.json_response(body=orjson.dumps({**head, **_whole(ask, text)}))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        with contextlib.suppress(ConnectionResetError):  # the client hung up
            await response.prepare(request)
            async for chunk in _events(ask, head, words):
                await response.write(b"data: " + chunk + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    def _head(self, request: web.Request, ask: _Ask) -> dict[str, object]:
        name = "chatcmpl" if ask.chat else "cmpl"
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        kind = ("chat.completion.chunk" if ask.stream else "chat.completion") if ask.chat else "text_completion"
        return {
            "id": f"{name}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.identity.model,
        }

    async def _words(self, ask: _Ask) -> AsyncIterator[str]:
        intro = f"[simulated {self.identity.profile} engine]".split()
        text = itertools.chain(intro, itertools.cycle(_FILLER.split()))
        start = asyncio.get_running_loop().time()
        async for done in self.engine.generate(ask.call, ask.output_tokens):
            self._metrics.on_token(ask, done, asyncio.get_running_loop().time() - start)
            yield next(text) if done == 1 else " " + next(text)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.identity.model, "object": "model", "owned_by": "tidegate-sim", "max_model_len": 131072}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION, "simulated": self.identity.profile})

    async def _exposition(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"content-type": exposition.CONTENT_TYPE_LATEST})


class _Metrics:
    """vLLM's metric names, as far as gateways read them."""

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
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens.", **names).labels(**label)  # type: ignore[arg-type]
        self._tokens = Counter("vllm:generation_tokens", "Tokens.", **names).labels(**label)  # type: ignore[arg-type]
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "TTFT.", **names).labels(**label)  # type: ignore[arg-type]

    def on_token(self, ask: _Ask, done: int, elapsed_s: float) -> None:
        self._tokens.inc()
        if done == 1:
            self._prompt.inc(ask.call.prompt_tokens)
            self._ttft.observe(elapsed_s)

    def expose(self) -> bytes:
        return exposition.generate_latest(self._registry)


def _parse(body: bytes, *, chat: bool, model: str) -> _Ask:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    if fields.get("model") not in (model, None):
        raise BadRequest(f"this engine serves {model!r}, not {fields['model']!r}")
    prompt_tokens = _prompt_tokens(fields.get("messages" if chat else "prompt"))
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadRequest("max_tokens must be a positive integer")
    output_tokens = limit or DEFAULT_OUTPUT_TOKENS
    extra = fields.get("vllm_xargs")
    options = fields.get("stream_options") or {}
    call = labels.read(
        asyncio.get_running_loop().time(),
        extra if isinstance(extra, dict) else {},
        call_id=CallId(uuid.uuid4().hex),
        prompt_tokens=prompt_tokens,
        max_tokens=output_tokens,
    )
    return _Ask(
        call=call,
        output_tokens=output_tokens,
        chat=chat,
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        limited=limit is not None,
    )


def _prompt_tokens(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    if isinstance(prompt, list):
        texts = [item.get("content") if isinstance(item, dict) else item for item in prompt]
    else:
        texts = [prompt]
    if not texts or any(text is None for text in texts):
        raise BadRequest("the prompt is missing")
    characters = sum(len(text if isinstance(text, str) else orjson.dumps(text)) for text in texts)
    return max(characters // CHARACTERS_A_TOKEN, 1)


def _whole(ask: _Ask, text: str) -> dict[str, object]:
    said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    return {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": _reason(ask)}], "usage": _usage(ask)}


async def _events(ask: _Ask, head: dict[str, object], words: AsyncIterator[str]) -> AsyncIterator[bytes]:
    if ask.chat:
        yield _event(head, {"delta": {"role": "assistant", "content": ""}}, None)
    async for word in words:
        yield _event(head, {"delta": {"content": word}} if ask.chat else {"text": word}, None)
    yield _event(head, {"delta": {}} if ask.chat else {"text": ""}, _reason(ask))
    if ask.include_usage:
        yield orjson.dumps({**head, "choices": [], "usage": _usage(ask)})


def _event(head: dict[str, object], said: dict[str, object], finish_reason: str | None) -> bytes:
    return orjson.dumps({**head, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}]})


def _reason(ask: _Ask) -> str:
    return "length" if ask.limited else "stop"


def _usage(ask: _Ask) -> dict[str, int]:
    prompt, output = ask.call.prompt_tokens, ask.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
