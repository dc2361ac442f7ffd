"""A simulated engine behind vLLM's face: its HTTP API, its metric names, and EngineControl.

For the gateway, the operator and the tests it is an engine like any other; its answers say that they are simulated.
`sim_request` reads requests and `realtime` paces the tokens; this module only translates.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from tidegate_policy.model import Call
from tidegate_sim import realtime, sim_request

VERSION = "0.32.0+tidegate.sim"
_FILLER = (
    "the engine is simulated so these words carry no meaning only timing each one took as long as the cost profile says"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the engine says it is."""

    model: str
    profile: str


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
            ask = sim_request.parse(await request.read(), chat=chat, model=self.identity.model)
        except sim_request.BadRequest as error:
            return _refusal(error)
        head = self._head(request, ask)
        words = self._words(ask)
        if not ask.stream:
            texts = [""] * len(ask.calls)
            async for index, word in words:
                texts[index] += word
            return web.json_response(body=orjson.dumps({**head, **_whole(ask, texts)}))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        with contextlib.suppress(ConnectionResetError):  # the client hung up
            await response.prepare(request)
            async for chunk in _events(ask, head, words):
                await response.write(b"data: " + chunk + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    def _head(self, request: web.Request, ask: sim_request.SimRequest) -> dict[str, object]:
        name = "chatcmpl" if ask.chat else "cmpl"
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        kind = ("chat.completion.chunk" if ask.stream else "chat.completion") if ask.chat else "text_completion"
        return {
            "id": f"{name}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.identity.model,
        }

    async def _words(self, ask: sim_request.SimRequest) -> AsyncIterator[tuple[int, str]]:
        """Each word as it comes, with the index of its choice."""
        text = f"[simulated {self.identity.profile} engine] {_FILLER}".split()
        start = asyncio.get_running_loop().time()
        async for index, done in self.engine.generate(ask.calls, ask.output_tokens):
            self._metrics.on_token(ask.calls[index], done, asyncio.get_running_loop().time() - start)
            word = text[(done - 1) % len(text)]
            yield index, word if done == 1 else f" {word}"

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

    def on_token(self, call: Call, done: int, elapsed_s: float) -> None:
        self._tokens.inc()
        if done == 1:
            self._prompt.inc(call.prompt_tokens)
            self._ttft.observe(elapsed_s)

    def expose(self) -> bytes:
        return exposition.generate_latest(self._registry)


def _whole(ask: sim_request.SimRequest, texts: list[str]) -> dict[str, object]:
    said: list[dict[str, object]] = [
        {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text} for text in texts
    ]
    return {"choices": [_choice(index, words, _reason(ask)) for index, words in enumerate(said)], "usage": _usage(ask)}


async def _events(
    ask: sim_request.SimRequest, head: dict[str, object], words: AsyncIterator[tuple[int, str]]
) -> AsyncIterator[bytes]:
    """As vLLM streams: choices take turns, each ends with its own reason."""
    left = [ask.output_tokens] * len(ask.calls)
    for index in range(len(left) if ask.chat else 0):
        yield _event(head, _choice(index, {"delta": {"role": "assistant", "content": ""}}, None))
    async for index, word in words:
        yield _event(head, _choice(index, {"delta": {"content": word}} if ask.chat else {"text": word}, None))
        left[index] -= 1
        if not left[index]:
            yield _event(head, _choice(index, {"delta": {}} if ask.chat else {"text": ""}, _reason(ask)))
    if ask.include_usage:
        yield orjson.dumps({**head, "choices": [], "usage": _usage(ask)})


def _event(head: dict[str, object], choice: dict[str, object]) -> bytes:
    return orjson.dumps({**head, "choices": [choice]})


def _choice(index: int, said: dict[str, object], finish_reason: str | None) -> dict[str, object]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}


def _reason(ask: sim_request.SimRequest) -> str:
    return "length" if ask.limited else "stop"


def _usage(ask: sim_request.SimRequest) -> dict[str, int]:
    prompt, output = ask.prompt_tokens, ask.output_tokens * len(ask.calls)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _refusal(error: sim_request.BadRequest) -> web.Response:
    body = {"message": str(error), "type": "BadRequestError", "param": error.param, "code": 400}
    return web.json_response({"error": body}, status=400)
