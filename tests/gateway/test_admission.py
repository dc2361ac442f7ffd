"""What a call may claim, and what a shed or rejected one gives back."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
import pytest

import fake_engine
from tidegate_gateway.lifecycle import admission, settlement, tenant_tokens
from tidegate_gateway.observe import background_loop, call_record, prometheus_metrics
from tidegate_gateway.openai import completions, error_table, parsed_request, request_fields
from tidegate_gateway.store import store_contract, store_link
from tidegate_gateway.workflows import workflow_service
from tidegate_policy.admit import entitlements
from tidegate_policy.model import Call, CallId

COST = {"step_s": 1.0, "prefill_s": 0.001}
"""A call of 4 tokens takes 4 s and its prompt."""


async def budget_ms(client: Any, engine: fake_engine.FakeEngine, **headers: str) -> float:
    """The time that the engine gets for the call."""
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
    async with fake_engine.engine() as engine, fake_engine.engine() as other:
        fast = {"url": engine.url, "cost": COST}
        slow = {"url": other.url, "name": "slow", "cost": {**COST, "step_s": 100.0}}
        async with up(fast, slow) as client:
            await client.ask(max_tokens=4)
            claimed = await budget_ms(client, engine, **claim)
            assert 2000 < claimed < 5000, "four steps of 1 s, and the time until it was sent"


async def test_a_claim_may_loosen_the_promise_of_its_class_but_not_tighten_it(up: Any) -> None:
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
        await until(lambda: client.gateway.placements.in_progress == 0 and client.gateway.tokens.settled)
        status, _, headers = await client.ask(headers=small)
        assert (status, headers["x-tidegate-reason"]) == (429, "tenant-limit")


async def test_false_usage_of_an_engine_costs_a_tenant_no_more_than_its_request_can_have(up: Any) -> None:
    tenants = [{"name": "small", "tokensPerMinute": 6000}]
    usage = {"prompt_tokens": 9_900_000, "completion_tokens": 9_900_000}
    lie = orjson.dumps({"choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage})
    async with fake_engine.engine(garbage=lie) as engine, up(engine, tenants=tenants) as client:
        small = {"x-tidegate-tenant": "small"}
        waits = []
        for _ in range(4):
            status, _, headers = await client.ask(headers=small)
            waits.append(int(headers["retry-after"]) if status == 429 else 0)
        assert waits[0] == 0
        assert 0 < max(waits) <= 120, "a few thousand tokens, and not a hundred thousand seconds"


async def test_a_rejected_workflow_call_gives_its_tokens_back(up: Any) -> None:
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


@dataclass(slots=True)
class SlowStore:
    """As much of a store as the end of one call needs; it records the end when the test lets it."""

    recording: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    ends: list[tuple[str, bool]] = field(default_factory=list)
    spent: list[int] = field(default_factory=list)

    async def finish(
        self, workflow: str, call: str, *, ok: bool, share_ms: int | None = None, tenant: str | None = None
    ) -> store_contract.Record:
        self.recording.set()
        await self.answers.wait()
        self.ends.append((call, ok))
        return store_contract.Record(
            id=workflow, state="running", template="", tenant="", created_ms=0, deadline_ms=1, now_ms=0, stages=()
        )

    async def spend(self, tenant: str, tokens: int, per_minute: int, *, used: bool = False) -> float:
        self.spent.append(tokens)
        return 0.0


async def test_a_client_that_hangs_up_while_the_end_is_recorded_has_been_served_and_pays_once(until: Any) -> None:
    store = SlowStore()
    link = store_link.StoreLink(cast("store_contract.Store", store))
    metrics = prometheus_metrics.Metrics()
    workflows = workflow_service.Workflows(link, metrics)
    tokens = tenant_tokens.TenantTokens(link, clock=time.monotonic)
    paying = asyncio.create_task(tokens.run(background_loop.BackgroundLoops(metrics)))
    request = parsed_request.from_body(
        completions.ENDPOINT, {"model": "fake", "prompt": "x"}, request_fields.RequestFields()
    )
    joined = store_contract.Record(
        id="w", state="running", template="", tenant="small", created_ms=0, deadline_ms=1, now_ms=0, stages=()
    )
    admitted = admission.AdmittedRequest(
        call=Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=8, output_predicted=5),
        request=request,
        membership=workflow_service.Membership(stage="a", call="c", record=joined),
        tenant=entitlements.Tenant(name="small", tokens_per_minute=100_000),
        booked=13,
    )
    record = call_record.CallRecord(
        arrived_at_s=0.0, operation="", model="fake", stream=False, prompt_tokens=10, output_tokens=5, tokens=5
    )
    ending = asyncio.create_task(settlement.Settlement(tokens, workflows).ended(admitted, record, ok=True))
    await store.recording.wait()
    ending.cancel()
    await asyncio.wait([ending])
    store.answers.set()
    await workflows.flush()
    await until(lambda: store.spent)
    paying.cancel()
    assert store.ends == [("c", True)]
    assert 13 + sum(store.spent) == 15, "the booking and the difference are what the call used"


async def test_without_a_store_a_tenant_has_its_minute_at_each_gateway(up: Any) -> None:
    tenants = [{"name": "small", "tokensPerMinute": 100}]
    nowhere = "redis://127.0.0.1:1"
    async with fake_engine.engine(tokens=60) as engine, up(engine, store=nowhere, tenants=tenants) as client:
        small = {"x-tidegate-tenant": "small"}
        statuses = [(await client.ask(max_tokens=60, headers=small))[0] for _ in range(3)]
        assert (statuses[0], statuses[-1]) == (200, 429)
        assert (await client.ask(max_tokens=60))[0] == 200


@pytest.mark.parametrize(("wait_s", "spent"), [(0.0, [700, -700]), (30.0, [700])])
async def test_a_booking_whose_client_hangs_up_meanwhile_is_given_back(wait_s: float, spent: list[int]) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    found: list[int] = []

    class Store:
        async def spend(self, tenant: str, tokens: int, per_minute: int, *, used: bool = False) -> float:
            found.append(tokens)
            asked.set()
            await may_answer.wait()
            return wait_s

    link = store_link.StoreLink(cast("store_contract.Store", Store()))
    link.up = True
    tokens = tenant_tokens.TenantTokens(link, clock=lambda: 0.0)
    small = entitlements.Tenant(name="small", tokens_per_minute=1000)
    call = asyncio.create_task(tokens.book(small, 700))
    await asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    await tokens.flush()
    assert found == spent


class DeadStore(SlowStore):
    """A store that does not answer until it is back."""

    is_back = False
    error: type[store_contract.Unavailable] = store_contract.Unavailable

    async def spend(self, tenant: str, tokens: int, per_minute: int, *, used: bool = False) -> float:
        if not self.is_back:
            raise self.error("gone")
        return await super().spend(tenant, tokens, per_minute, used=used)


async def test_what_a_tenant_used_without_the_store_is_told_when_it_is_back() -> None:
    store = DeadStore()
    link = store_link.StoreLink(cast("store_contract.Store", store))
    tokens = tenant_tokens.TenantTokens(link, clock=lambda: 0.0)
    small = entitlements.Tenant(name="small", tokens_per_minute=1000)
    await tokens.book(small, 700)  # the store may have booked it
    await tokens.book(small, 900)
    with pytest.raises(error_table.Shed):
        await tokens.book(small, 900)
    store.is_back, link.up = True, True
    await tokens.book(small, 50)
    await tokens.book(small, 60)
    assert store.spent == [900, 50, 60]


async def test_a_booking_that_was_not_sent_is_counted_here() -> None:
    """Else the settlement would subtract it from what the tenant used before."""
    store = DeadStore()
    store.error = store_contract.NotSent
    link = store_link.StoreLink(cast("store_contract.Store", store))
    tokens = tenant_tokens.TenantTokens(link, clock=lambda: 0.0)
    small = entitlements.Tenant(name="small", tokens_per_minute=1000)
    await tokens.book(small, 700)
    tokens.settle(small, used=100, booked=700)
    await tokens.flush()
    store.is_back, link.up = True, True
    await tokens.book(small, 50)
    assert store.spent == [100, 50]


async def test_what_is_given_back_while_the_store_is_down_is_told_when_it_is_back() -> None:
    store = SlowStore()
    link = store_link.StoreLink(cast("store_contract.Store", store))
    tokens = tenant_tokens.TenantTokens(link, clock=lambda: 0.0)
    small = entitlements.Tenant(name="small", tokens_per_minute=1000)
    await tokens.book(small, 900)
    link.up = False
    tokens.settle(small, used=10, booked=900)
    await tokens.flush()
    assert store.spent == [900]
    link.up = True
    await tokens.flush()
    assert store.spent == [900, -890]


async def test_what_was_booked_here_is_given_back_here() -> None:
    store = SlowStore()
    link = store_link.StoreLink(cast("store_contract.Store", store))
    link.up = False
    tokens = tenant_tokens.TenantTokens(link, clock=lambda: 0.0)
    small = entitlements.Tenant(name="small", tokens_per_minute=1000)
    await tokens.book(small, 900)
    tokens.settle(small, used=10, booked=900)
    await tokens.flush()
    link.up = True
    await tokens.book(small, 50)
    assert store.spent == [10, 50]


async def test_a_settlement_that_is_cancelled_is_not_booked_twice() -> None:
    asked, found = asyncio.Event(), []

    class Store:
        async def spend(self, tenant: str, tokens: int, per_minute: int, *, used: bool = False) -> float:
            found.append(tokens)
            asked.set()
            if len(found) == 1:
                await asyncio.Event().wait()  # it has booked, and its answer does not come
            return 0.0

    link = store_link.StoreLink(cast("store_contract.Store", Store()))
    link.up = True
    tokens = tenant_tokens.TenantTokens(link, clock=lambda: 0.0)
    tokens.settle(entitlements.Tenant(name="small", tokens_per_minute=1000), used=400, booked=0)
    loop = asyncio.create_task(tokens.flush())
    await asked.wait()
    loop.cancel()
    await asyncio.wait([loop])
    await tokens.flush()
    assert found == [400]
