"""Each documented call works through the official OpenAI SDK and the generated gRPC client, on simulated engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import api_surface
import grpc
import openai
import pytest
from aiohttp import web

from tidegate_policy import cost
from tidegate_proto.v1 import inference_pb2_grpc
from tidegate_sim import openai_double, realtime

COST = cost.CostModel(step_s=0.002, prefill_s=1e-6, max_batch=8, max_step_tokens=512)
Step = Callable[[openai.AsyncOpenAI, str], Awaitable[None]]


@contextlib.asynccontextmanager
async def simulated() -> AsyncIterator[dict[str, Any]]:
    """A simulated engine, as the settings of a gateway name it."""
    engine = realtime.RealtimeEngine(COST, policy="fcfs")
    runner = web.AppRunner(
        openai_double.SimulatedEngine(engine, openai_double.Identity(model="m", profile="test")).app,
        handler_cancellation=True,
        access_log=None,
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stepping = asyncio.create_task(engine.run())
    try:
        yield {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    finally:
        stepping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stepping
        await runner.cleanup()


@pytest.mark.parametrize(
    "step",
    [
        api_surface.chat_and_completions,
        api_surface.responses,
        api_surface.streamed_responses,
        api_surface.embeddings,
        api_surface.tools_and_structured_output,
        api_surface.models,
        api_surface.workflows,
        api_surface.relqueries,
    ],
    ids=lambda step: step.__name__,
)
async def test_calls_through_the_openai_sdk(up: Any, step: Step) -> None:
    async with simulated() as one, simulated() as two, up(one, two) as client, client.openai() as sdk:
        await step(sdk, "m")


async def test_calls_through_the_generated_grpc_client(up: Any) -> None:
    async with simulated() as one, simulated() as two, up(one, two, listen={"grpcPort": 0}) as client:
        await api_surface.over_grpc(client.grpc, "m")
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            (vectors,) = await api_surface.called(inference, "/v1/embeddings", {"model": "m", "input": ["a", "b"]})
        assert [item["index"] for item in vectors["data"]] == [0, 1]


async def test_the_rows_of_an_address_through_the_generated_grpc_client(up: Any) -> None:
    async def table(_: web.Request) -> web.Response:
        return web.Response(body=api_surface.TABLE, content_type="text/csv")

    application = web.Application()
    application.router.add_get("/tables/{name}", table)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        prefix = f"http://127.0.0.1:{runner.addresses[0][1]}/tables/"
        settings = {"listen": {"grpcPort": 0}, "relqueries": {"rowsUrls": [prefix]}}
        async with simulated() as one, up(one, **settings) as client:
            await api_surface.rows_of_an_address_over_grpc(client.grpc, "m", prefix + "countries.csv")
    finally:
        await runner.cleanup()
