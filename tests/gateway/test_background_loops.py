"""An exception in a background loop ends neither the loop nor the gateway."""

import asyncio
import json
from typing import Any

import pytest

from tidegate_gateway import fake_engine
from tidegate_gateway.observe import background_loop, prometheus_metrics


async def test_an_error_is_logged_once_for_each_kind_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    metrics = prometheus_metrics.Metrics()
    loops = background_loop.BackgroundLoops(metrics)
    errors: list[Exception] = [ValueError("one"), ValueError("two"), KeyError("three")]

    async def step() -> None:
        if errors:
            raise errors.pop(0)

    assert [await loops.step("exchange", step) for _ in range(4)] == [False, False, False, True]
    assert len(caplog.records) == 2
    counted = metrics.registry.get_sample_value("tidegate_background_errors_total", {"loop": "exchange"})
    assert counted == 3


async def test_a_cancelled_step_is_cancelled() -> None:
    loops = background_loop.BackgroundLoops(prometheus_metrics.Metrics())
    step = asyncio.create_task(loops.step("exchange", lambda: asyncio.sleep(60)))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


@pytest.mark.parametrize("stream", [True, False])
async def test_an_absurd_usage_leaves_the_gateway_and_its_exchange_alive(up: Any, until: Any, stream: bool) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 150_000_000_000_000_000}
    event = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    garbage = json.dumps({**event, "usage": usage}).encode()
    if stream:
        last = json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()
        garbage = b"data: " + json.dumps(event).encode() + b"\n\ndata: " + last + b"\n\ndata: [DONE]\n\n"
    async with fake_engine.engine(garbage=garbage) as engine, up(engine) as client:
        body = {"model": "fake", "prompt": "x", "stream": stream}
        async with client.http.post(client.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()
        engine.garbage, engine.hang = None, True
        waiting = asyncio.create_task(client.ask("/v1/completions", prompt="x"))
        await until(lambda: engine.running == 1)
        assert engine.bodies[-1]["vllm_xargs"]["tg.out_pred"] <= 10_000_000
        async with up(engine, pool=client.gateway.settings.store.pool) as other:
            await until(lambda: any(known.facts.others.calls for known in other.gateway.core.engines))
        waiting.cancel()
        count = client.gateway.metrics.registry.get_sample_value
        assert count("tidegate_background_errors_total", {"loop": "exchange"}) is None
