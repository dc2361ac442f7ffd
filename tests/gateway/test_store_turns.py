"""Tenants take turns at the store's connections."""

import asyncio
import contextlib
import secrets
from typing import Any

import pytest
from redis import asyncio as redis

import fake_engine
from tidegate_gateway import gateway_settings, loop_steps
from tidegate_gateway.store import store_contract, valkey_store


async def test_a_tenant_with_many_commands_delays_another_by_one_command(valkey_url: str) -> None:
    """One connection for tenants: without turns the other tenant's command would be the last of 301."""
    settings = gateway_settings.Store(url=valkey_url, pool=secrets.token_hex(4), timeout_s=30.0, connections=5)
    store = valkey_store.Valkey(settings, gateway="g1")
    try:
        await store.create(store_contract.NewWorkflow(id="w", deadline_ms=60_000, stages=()))
        ended: list[str] = []

        async def look(tenant: str) -> None:
            with contextlib.suppress(store_contract.Rejected):
                await store.get("w", by=tenant)
            ended.append(tenant)

        async with asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(look("flood"))
            group.create_task(look("honest"))
        assert ended.index("honest") <= 3
        assert ended.count("flood") == 300
    finally:
        await store.close()


async def test_ends_of_calls_take_the_turns_of_their_tenants(valkey_url: str) -> None:
    settings = gateway_settings.Store(url=valkey_url, pool=secrets.token_hex(4), timeout_s=30.0, connections=5)
    store = valkey_store.Valkey(settings, gateway="g1")
    try:
        ended: list[str] = []

        async def end(tenant: str | None, call: str) -> None:
            await store.finish(tenant or "honest", call, ok=True, tenant=tenant)
            ended.append(tenant or "the gateway's own")

        for tenant, calls in (("flood", 200), ("honest", 2)):
            for number in range(calls):
                await store.join(tenant, "a", f"{tenant}{number}", deadline_ms=60_000, tenant=tenant)
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(end("flood", f"flood{number}"))
            group.create_task(end("honest", "honest0"))
            group.create_task(end(None, "honest1"))
        assert ended.index("honest") <= 5
        assert ended.index("the gateway's own") <= 10, "it waits for no tenant"
    finally:
        await store.close()


async def test_tokens_that_were_used_wait_for_no_tenant(valkey_url: str) -> None:
    """Else the tokens of all tenants would be told late while one of them has many commands."""
    settings = gateway_settings.Store(url=valkey_url, pool=secrets.token_hex(4), timeout_s=30.0, connections=5)
    store = valkey_store.Valkey(settings, gateway="g1")
    try:
        ended: list[bool] = []

        async def spend(*, used: bool) -> None:
            await store.spend("flood", 1, 1_000_000, used=used)
            ended.append(used)

        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(spend(used=False))
            group.create_task(spend(used=True))
        assert ended.index(True) <= 10
    finally:
        await store.close()


async def took(turns: loop_steps.TenantTurns, tenant: str, order: list[str]) -> None:
    async with turns.of(tenant):
        order.append(tenant)
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_keep_their_order() -> None:
    shared, order = loop_steps.TenantTurns(), list[str]()
    async with asyncio.TaskGroup() as group:
        for tenant in ("a", "a", "a", "b", "b", "c"):
            group.create_task(took(shared, tenant, order))
    assert order == ["a", "a", "b", "c", "a", "b"]
    assert len(shared) == 0


async def test_a_command_that_is_cancelled_gives_its_turn_to_the_next() -> None:
    shared, order = loop_steps.TenantTurns(), list[str]()
    await shared.take("first")
    cancelled = asyncio.create_task(took(shared, "cancelled", order))
    at_once = asyncio.create_task(took(shared, "cancelled as its turn came", order))
    last = asyncio.create_task(took(shared, "last", order))
    await asyncio.sleep(0)
    cancelled.cancel()
    shared.give_back()
    at_once.cancel()
    await asyncio.wait([cancelled, at_once, last])
    assert (cancelled.cancelled(), at_once.cancelled(), order) == (True, True, ["last"])
    await shared.take("the turn is free again")


async def test_commands_that_wait_fail_together_with_the_store() -> None:
    shared, order = loop_steps.TenantTurns(), list[str]()
    await shared.take("first")
    waiting = [asyncio.create_task(took(shared, "a", order)) for _ in range(3)]
    await asyncio.sleep(0)
    shared.fail(lambda: store_contract.Unavailable("the store does not answer"))
    for task in waiting:
        with pytest.raises(store_contract.Unavailable, match="does not answer"):
            await task
    shared.give_back()
    await took(shared, "later", order)
    assert order == ["later"]


async def test_one_slow_command_is_not_taken_for_a_store_that_is_down(
    up: Any, until: Any, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, pool = redis.Redis.from_url(valkey_url), secrets.token_hex(4)
    tenants = [{"name": "metered", "tokensPerMinute": 1_000_000}]
    async with (
        fake_engine.engine() as engine,
        up(engine, pool=pool, store_options={"timeout": "500ms", "sync": "60s"}, tenants=tenants) as gateway,
    ):
        await until(lambda: client.zcard(f"tidegate:v1:{{{pool}}}:leases"))  # the first exchange is over
        async with asyncio.TaskGroup() as group:
            await client.client_pause(3_000)  # as behind a command that takes this long
            slow = [group.create_task(gateway.send("GET", "/v1/relqueries/none")) for _ in range(40)]
            metered = group.create_task(gateway.ask(headers={"x-tidegate-tenant": "metered"}))
        assert gateway.gateway.link.up
        statuses = {request.result()[0] for request in slow}
        assert 503 in statuses
        assert statuses <= {404, 503}
        assert metered.result()[0] == 200
        await client.ping()  # the store answers again
        assert (await gateway.send("GET", "/v1/relqueries/none"))[0] == 404
    assert "shed until the store answers" not in caplog.text
    assert "the store answers" not in caplog.text, "it was never taken for down"
    await client.aclose()
