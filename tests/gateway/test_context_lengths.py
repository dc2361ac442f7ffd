"""Pools whose engines have contexts of different lengths."""

import asyncio
from typing import Any

import pytest

import fake_engine
from tidegate_gateway.lifecycle import context_lengths
from tidegate_policy.model import EngineId

FAST, SLOW = {"step_s": 0.0001, "prefill_s": 0.00001}, {"step_s": 0.1, "prefill_s": 0.01}
SMALL, LARGE = EngineId("small"), EngineId("large")


def said(characters: int) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "x" * characters}]}


async def asked(client: Any, **body: Any) -> tuple[int, str | None]:
    """The status of the answer, and the engine that gave it."""
    status, _, headers = await client.send("POST", "/v1/chat/completions", json=body)
    return status, headers.get("x-tidegate-engine")


@pytest.fixture
async def two(up: Any) -> Any:
    """A gateway with a fast engine of 1,000 tokens and a slow one of 100,000, and the engines."""
    async with fake_engine.engine(context_tokens=1000) as small, fake_engine.engine(context_tokens=100_000) as large:
        engines = ({"name": SMALL, "url": small.url, "cost": FAST}, {"name": LARGE, "url": large.url, "cost": SLOW})
        async with up(*engines, dispatch={"learnCosts": False}) as client:
            yield client, small, large


async def test_a_call_goes_to_an_engine_whose_context_holds_it(two: Any) -> None:
    client, small, large = two
    assert await asked(client, **said(400)) == (200, SMALL)
    assert await asked(client, **said(40_000)) == (200, LARGE)
    assert await asked(client, **said(400), max_tokens=2000) == (200, LARGE), "the answer needs room too"
    assert len(small.bodies) == 1
    assert len(large.bodies) == 2


async def test_a_call_that_is_longer_than_estimated_goes_on_to_a_longer_context(two: Any) -> None:
    client, small, _ = two
    for _ in range(5):
        assert await asked(client, **said(3000)) == (200, LARGE), "750 tokens by the usual estimate, 1,500 in truth"
    assert small.bodies, "the engine with the short context was asked first"
    assert await asked(client, **said(400)) == (200, SMALL), "it is not blamed"


async def test_a_call_that_outgrows_one_of_three_contexts_goes_to_the_longest(up: Any) -> None:
    async with (
        fake_engine.engine(context_tokens=1000) as small,
        fake_engine.engine(context_tokens=1100) as middle,
        fake_engine.engine(context_tokens=100_000) as large,
    ):
        engines = (
            {"name": SMALL, "url": small.url, "cost": FAST},
            {"name": "middle", "url": middle.url, "cost": FAST},
            {"name": LARGE, "url": large.url, "cost": SLOW},
        )
        async with up(*engines, dispatch={"learnCosts": False}) as client:
            assert await asked(client, **said(3000)) == (200, LARGE)


async def test_a_call_that_only_an_engine_in_trouble_holds_is_not_rejected_by_another_one(two: Any, until: Any) -> None:
    client, small, large = two
    large.healthy = False
    core = client.gateway.core
    await until(lambda: [engine.facts.id for engine in core.engines.accepting(client.gateway.clock())] == [SMALL])
    call = asyncio.create_task(asked(client, **said(40_000)))
    await asyncio.sleep(0.05)
    large.healthy = True
    assert await call in {(200, LARGE), (503, None)}, (
        "it waits for a doubtful engine; one that is down is named as such"
    )
    assert not small.bodies


async def test_a_call_that_no_context_holds_gets_the_answer_of_the_longest(two: Any) -> None:
    client, small, large = two
    status, engine = await asked(client, **said(1_000_000))
    assert (status, engine) == (400, LARGE)
    assert not small.bodies
    assert len(large.bodies) == 1
    assert client.gateway.core.offered.load.prompt_tokens == 0, "a rejected call is no work"


async def test_a_short_call_that_is_wrong_is_rejected_once(two: Any) -> None:
    client, small, large = two
    small.status = large.status = 400
    assert await asked(client, **said(400)) == (400, SMALL)
    assert not large.bodies


def test_an_engine_that_does_not_tell_its_context_may_get_every_call() -> None:
    contexts = context_lengths.ContextLengths()
    contexts.set({SMALL: 1000, LARGE: None})
    assert not contexts.differ_for(5000)
    assert contexts.hold(SMALL, 5000)
    contexts.set({SMALL: 1000, LARGE: 5000})
    assert contexts.differ_for(501)
    assert not contexts.differ_for(500), "half of the shortest context holds a call of twice the estimate"
    assert not contexts.hold(SMALL, 3000)
    assert contexts.hold(LARGE, 9000)
    waits = context_lengths.Fitting(contexts, 3000, {SMALL, LARGE})
    assert LARGE in waits
    assert SMALL not in waits
    contexts.set({SMALL: 1000})
    assert SMALL in waits, "the engine with the longest context left decides"
    assert not waits.outgrows(SMALL)
