"""What a call may claim, and what a refused one gives back."""

import asyncio
from typing import Any

import pytest

from tidegate_gateway import fake_engine

COST = {"step_s": 1.0, "prefill_s": 0.001}
"""A call of 4 tokens takes 4 s and its prompt."""


async def budget_ms(client: Any, engine: fake_engine.FakeEngine, **headers: str) -> float:
    """What the engine is told that the call may take."""
    status, _, _ = await client.ask(headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert status == 200
    found: float = engine.bodies[-1]["vllm_xargs"]["tg.budget_ms"]
    return found


CLAIMS = (
    {"x_tidegate_deadline_ms": "200"},
    {"x_tidegate_slo_ttft_ms": "1", "x_tidegate_slo_tpot_ms": "1"},
    {"x_tidegate_deadline_ms": "200", "x_tidegate_workflow": "w"},
)


@pytest.mark.parametrize("claim", CLAIMS)
async def test_an_impossible_claim_is_due_when_the_fastest_engine_could_have_answered(
    up: Any, claim: dict[str, str]
) -> None:
    async with fake_engine.engine() as engine:
        fast = {"url": engine.url, "cost": COST}
        slow = {"url": engine.url, "name": "slow", "cost": {**COST, "step_s": 100.0}}
        async with up(fast, slow) as client:
            await client.ask(max_tokens=4)
            claimed = await budget_ms(client, engine, **claim)
            assert 2000 < claimed < 5000, "four steps of 1 s, and the time until it was sent"


async def test_a_claim_may_loosen_what_its_class_promises_but_not_tighten_it(up: Any) -> None:
    classes = [
        {"name": "chat", "ttft": "20s", "tpot": "1s"},
        {"name": "batch", "deadline": "10m"},
    ]
    async with fake_engine.engine() as engine, up({"url": engine.url, "cost": COST}, classes=classes) as client:
        for _ in range(20):
            await client.ask(max_tokens=4)
        batch, chat = {"x_tidegate_class": "batch"}, {"x_tidegate_class": "chat"}
        for claim in CLAIMS[:2]:
            assert await budget_ms(client, engine, **batch, **claim) == pytest.approx(600_000, rel=0.01)
            assert await budget_ms(client, engine, **chat, **claim) == pytest.approx(24_000, rel=0.1)
        loose = {"x_tidegate_slo_ttft_ms": "50000"}
        assert await budget_ms(client, engine, **chat, **loose) == pytest.approx(54_000, rel=0.1)
        assert await budget_ms(client, engine, **batch, x_tidegate_deadline_ms="900000") > 800_000


async def test_tokens_are_counted_of_calls_that_are_cut(up: Any, until: Any) -> None:
    tenants = [{"name": "small", "tokensPerMinute": 2000}]
    async with fake_engine.engine(tokens=5000) as engine, up(engine, tenants=tenants) as client:
        body = {"model": "fake", "prompt": "x", "stream": True}
        small = {"x-tidegate-tenant": "small"}
        async with client.http.post(client.url + "/v1/completions", json=body, headers=small) as response:
            read = 0
            while read < 3000:
                read += (await response.content.readany()).count(b"data:")
            response.close()
        await until(lambda: client.gateway.placements.in_progress == 0)
        status, _, headers = await client.ask(headers=small)
        assert (status, headers["x-tidegate-reason"]) == (429, "tenant-limit")


async def test_a_refused_workflow_call_gives_its_tokens_back(up: Any) -> None:
    tenants = [{"name": "small", "tokensPerMinute": 600}]
    async with fake_engine.engine(prompt_tokens=280) as engine, up(engine, tenants=tenants) as client:
        small = {"x-tidegate-tenant": "small"}
        call = {"prompt": "x" * 1120, "max_tokens": 4}
        for _ in range(5):
            status, _, _ = await client.ask(
                "/v1/completions", **call, headers={**small, "x-tidegate-workflow": "nobody"}
            )
            assert status == 404
        for expected in (200, 200, 429):
            assert (await client.ask("/v1/completions", **call, headers=small))[0] == expected


async def test_who_hangs_up_while_the_end_is_recorded_has_been_served_and_pays_once(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = [{"name": "small", "tokensPerMinute": 100_000}]
    async with fake_engine.engine(prompt_tokens=10, tokens=5) as engine, up(engine, tenants=tenants) as client:
        kept, recording, settled = client.gateway.link.store, asyncio.Event(), []
        finish, spend = kept.finish, kept.spend

        async def slow(*words: Any, **more: Any) -> None:
            if not recording.is_set():
                recording.set()
                await asyncio.sleep(60)
            await finish(*words, **more)

        async def counted(tenant: str, tokens: int, per_minute: int, **more: Any) -> float:
            settled.append(tokens)
            return float(await spend(tenant, tokens, per_minute, **more))

        monkeypatch.setattr(kept, "finish", slow)
        monkeypatch.setattr(kept, "spend", counted)
        body = {"id": "w", "deadline_ms": 60_000, "stages": [{"name": "a"}], "tenant": "small"}
        await client.send("POST", "/v1/workflows", json=body)
        headers = {"x-tidegate-tenant": "small", "x-tidegate-workflow": "w", "x-tidegate-stage": "a"}
        asking = asyncio.create_task(client.ask(headers=headers))
        await until(recording.is_set)
        asking.cancel()

        async def done() -> bool:
            (stage,) = (await client.send("GET", "/v1/workflows/w", headers=headers))[1]["stages"]
            return (stage["calls_running"], stage["calls_done"]) == (0, 1)

        await until(done)
        await until(lambda: sum(settled) == 15)
