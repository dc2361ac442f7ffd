"""Each documented call works through the official OpenAI SDK and the generated gRPC client, on simulated engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import api_surface
import openai
import pytest
from aiohttp import web

from tidegate_policy import cost
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
