"""The model of the selector `llm` over real sockets: whatever the server does, there is one answer in time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from tidegate_control import bounded_http, llm_adviser
from tidegate_policy.steer import llm_choice

ALLOW = ("edf", "sjf")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def asked(handler: Handler, timeout_s: float = 5.0) -> AsyncIterator[llm_choice.Answer]:
    """The answer of a server with this handler."""
    application = web.Application()
    application.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    model = llm_adviser.Model(url=f"http://{host}:{port}/v1/", name="judge", timeout_s=timeout_s, key="secret")
    try:
        yield await llm_adviser.ask(bounded_http.Client(), model, [{"role": "user", "content": "{}"}], ALLOW)
    finally:
        await runner.cleanup()


def completion(text: object) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


async def test_the_request_carries_the_key_and_a_schema_of_the_allowed_policies() -> None:
    seen: list[tuple[str, dict[str, object]]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        return completion('{"policy": "sjf"}')

    async with asked(handler) as answer:
        assert answer == llm_choice.Answer(policy="sjf")
    (key, body) = seen[0]
    assert (key, body["model"], body["temperature"]) == ("Bearer secret", "judge", 0)
    assert '"enum": ["edf", "sjf"]' in json.dumps(body["response_format"])


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        (completion("The pool is busy, so I suggest edf."), "the answer is no JSON"),
        (completion('{"policy": "format-disk"}'), "the answer names no allowed policy"),
        (completion(None), "the response has no text"),
        (web.json_response({"choices": []}), "the response is no chat completion"),
        (web.json_response([1]), "the response is no chat completion"),
        (web.Response(text="x" * 70_000), "the answer has more than 65536 bytes"),
        (web.Response(status=401, text='{"policy": "edf"}'), "the model's server answered with status 401"),
        (web.Response(status=302, headers={"Location": "/v1/models"}), "the model's server answered with status 302"),
    ],
)
async def test_every_other_response_is_no_answer_and_is_named(body: web.Response, trouble: str) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return body

    async with asked(handler) as answer:
        assert answer == llm_choice.Answer(policy=None, trouble=trouble)


async def test_a_late_answer_is_no_answer() -> None:
    async def handler(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return completion('{"policy": "edf"}')

    async with asked(handler, timeout_s=0.1) as answer:
        assert answer == llm_choice.Answer(policy=None, trouble="the model gave no answer in 0.1 s")


async def test_a_server_that_cannot_be_reached_is_no_answer() -> None:
    model = llm_adviser.Model(url="http://127.0.0.1:1/v1", name="judge", timeout_s=5.0)
    answer = await llm_adviser.ask(bounded_http.Client(), model, [], ALLOW)
    assert answer.policy is None
    assert answer.trouble.startswith("the model cannot be reached")
