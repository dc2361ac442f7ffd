"""What tests of troubled engines share: a preferred engine, a stream's events, an engine that never ends a stream."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
from aiohttp import web

import fake_engine


def refused_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def preferring(first: fake_engine.FakeEngine, second: fake_engine.FakeEngine) -> list[dict[str, Any]]:
    """Both engines, of which dispatch takes the first while it is idle."""
    cost = {"step_s": 0.0001, "prefill_s": 0.00001}
    return [{"url": first.url, "cost": cost}, {"url": second.url, "cost": {**cost, "step_s": 0.001}}]


async def stream(client: Any, **fields: Any) -> list[Any]:
    body = {"model": "fake", "prompt": "x", "stream": True, **fields}
    async with client.http.post(client.url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    events = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else orjson.loads(event) for event in events]


@contextlib.asynccontextmanager
async def endless(first: bytes, again: bytes) -> AsyncIterator[str]:
    """An engine that answers each call with `first`, and then with `again` without an end; its URL."""

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(again)
                await asyncio.sleep(0.01)
        return response

    async with fake_engine.engine() as probed:
        application = web.Application()

        async def models(request: web.Request) -> web.StreamResponse:
            return await probed.models(request)

        async def page(request: web.Request) -> web.StreamResponse:
            return web.Response()

        application.add_routes(
            [
                web.post("/v1/completions", complete),
                web.get("/v1/models", models),
                web.get("/health", page),
                web.get("/metrics", page),
            ]
        )
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
