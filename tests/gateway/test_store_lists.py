"""What the store's indexes list: the newest first, nothing twice, nothing that is not there any more."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import asyncio as valkey

from tidegate_gateway import gateway_settings, stage_declaration
from tidegate_gateway.store import store_contract, valkey_store


@contextlib.asynccontextmanager
async def pool(url: str, **options: Any) -> AsyncIterator[tuple[valkey_store.Valkey, valkey.Redis, str]]:
    """A store, its server, and what its keys begin with."""
    shared = gateway_settings.Store(**({"url": url, "pool": secrets.token_hex(4), "timeout_s": 5.0} | options))
    store, server = valkey_store.Valkey(shared, gateway="g1"), valkey.Redis.from_url(url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.aclose)
        stack.push_async_callback(store.close)
        yield store, server, f"tidegate:v1:{{{shared.pool}}}:"


def flow(number: int, **fields: Any) -> store_contract.NewWorkflow:
    return store_contract.NewWorkflow(**({"id": f"w{number}", "deadline_ms": 60_000} | fields))


def ids(found: list[store_contract.Record]) -> list[str]:
    return [record.id for record in found]


async def test_the_newest_are_those_created_last_whatever_their_deadlines(valkey_url: str) -> None:
    async with pool(valkey_url) as (store, _, _):
        for number in range(6):
            await store.create(flow(number, deadline_ms=60_000 - 10_000 * number, tenant="t"))
        for ended in ("w5", "w0"):
            await store.complete(ended)
        assert ids((await store.listed("running", 2))[0]) == ["w4", "w3"]
        assert ids((await store.listed("running", 2, by="t"))[0]) == ["w4", "w3"]
        assert ids((await store.listed("done", 1))[0]) == ["w5"]
        assert ids((await store.listed(None, 3))[0]) == ["w5", "w4", "w3"]
        assert ids((await store.listed(None, 100))[0]) == ["w5", "w4", "w3", "w2", "w1", "w0"]


async def test_ids_whose_records_are_gone_take_no_place_in_a_list(valkey_url: str) -> None:
    async with pool(valkey_url) as (store, server, prefix):
        for number in range(9):
            await store.create(flow(number, tenant="t"))
        for number in (2, 5, 6, 7, 8):
            await server.delete(f"{prefix}workflow:w{number}")
        for by in (None, "t"):
            assert ids((await store.listed("running", 2, by=by))[0]) == ["w4", "w3"]
            assert ids((await store.listed(None, 100, by=by))[0]) == ["w4", "w3", "w1", "w0"]


async def test_a_list_shows_overdue_workflows_as_expired(valkey_url: str) -> None:
    async with pool(valkey_url, grace_s=0.0) as (store, _, _):
        await store.create(flow(1, deadline_ms=1))
        await store.create(flow(2))
        await asyncio.sleep(0.01)
        assert ids((await store.listed("running", 10))[0]) == ["w2"]
        assert [(record.id, record.state) for record in (await store.listed(None, 10))[0]] == [
            ("w2", "running"),
            ("w1", "expired"),
        ]


async def test_a_long_list_of_every_state_is_few_scripts(valkey_url: str) -> None:
    async with pool(valkey_url) as (store, server, _):
        await asyncio.gather(*(store.create(flow(number)) for number in range(300)))
        await asyncio.gather(*(store.complete(f"w{number}") for number in range(150)))
        before = await server.info("commandstats")
        assert len((await store.listed(None, 300))[0]) == 300
        after = await server.info("commandstats")
        scripts = [stats["cmdstat_evalsha"]["calls"] for stats in (before, after)]
        assert scripts[1] - scripts[0] <= 3


async def test_records_and_lists_are_bounded_in_bytes(valkey_url: str) -> None:
    async with pool(valkey_url) as (store, server, prefix):
        long = [f"{number:03}" + "x" * 125 for number in range(stage_declaration.MOST_STAGES)]
        for flow_id in range(20):
            await store.join(f"w{flow_id}", long[0], "c", deadline_ms=60_000, tenant="")
            await store.finish(f"w{flow_id}", "c", ok=True)
        with contextlib.suppress(store_contract.Rejected):
            for name in long[1:]:
                await store.join("w0", name, "c", deadline_ms=None, tenant="")
                await store.finish("w0", "c", ok=True)
        with pytest.raises(store_contract.Rejected, match="too_many_stages"):
            await store.join("w0", long[-1], "c", deadline_ms=None, tenant="")
        assert 32 * 1024 < await server.strlen(f"{prefix}workflow:w0") <= stage_declaration.MOST_RECORD_BYTES
        large = await server.get(f"{prefix}workflow:w0")
        for flow_id in range(20):
            await server.set(f"{prefix}workflow:w{flow_id}", large)
        rows, more = await store.listed(None, 20)
        assert 1 < len(rows) < 20
        assert more
        assert len((await store.listed(None, 1))[0]) == 1


async def test_the_record_of_stages_that_run_at_the_same_time_is_bounded_in_bytes(valkey_url: str) -> None:
    async with pool(valkey_url) as (store, server, prefix):
        names = [f"{number:03}" + "x" * 125 for number in range(stage_declaration.MOST_STAGES)]
        begun = []
        with contextlib.suppress(store_contract.Rejected):
            for name in names[:-1]:
                await store.join("w0", name, f"c{name}", deadline_ms=60_000, tenant="")
                begun.append(name)
        for name in begun[:-1]:
            await store.finish("w0", f"c{name}", ok=True)
        with contextlib.suppress(store_contract.Rejected):
            await store.join("w0", names[-1], "last", deadline_ms=None, tenant="")
        assert 32 * 1024 < await server.strlen(f"{prefix}workflow:w0") <= stage_declaration.MOST_RECORD_BYTES


async def test_the_record_of_the_largest_declaration_is_bounded_in_bytes(valkey_url: str) -> None:
    """As many stages as may be, with as long names as may be, all of which have begun and are over."""
    stages = [
        stage_declaration.StageDeclaration(name=f"{number:03}", parallel=1000, repeat=1000)
        for number in range(stage_declaration.MOST_STAGES)
    ]
    left = stage_declaration.MOST_RECORD_BYTES - stage_declaration.record_bytes(stages)
    first, longer = stages[0].name, left // 140
    for number in range(1, longer + 1):  # each of them takes five bytes for the list, and up to 125 for the name
        stages[number] = dataclasses.replace(stages[number], name=stages[number].name + "x" * 125, after=(first,))
    stage_declaration.check(stages)
    assert stage_declaration.MOST_RECORD_BYTES - stage_declaration.record_bytes(stages) < 2000
    with pytest.raises(stage_declaration.BadStages, match="need a record of more"):
        stage_declaration.check(
            [*stages[:-20], *(dataclasses.replace(one, name=one.name + "x" * 125) for one in stages[-20:])]
        )
    async with pool(valkey_url) as (store, server, prefix):
        await store.create(flow(0, stages=tuple(stages)))
        for stage in stages:
            await store.join("w0", stage.name, "c", deadline_ms=None, tenant="")
            await store.finish("w0", "c", ok=True)
            await store.complete_stage("w0", stage.name)
        assert await server.strlen(f"{prefix}workflow:w0") <= stage_declaration.MOST_RECORD_BYTES


async def test_lapsed_records_leave_every_index(valkey_url: str) -> None:
    async with pool(valkey_url, grace_s=0.0, retention_s=0.05) as (store, server, prefix):
        await store.create(flow(1, deadline_ms=1, tenant="t"))
        async with asyncio.timeout(10):
            while await server.exists(f"{prefix}workflow:w1"):
                await asyncio.sleep(0.02)
        await store.create(flow(2, tenant="t"))
        names = [name.decode() for name in await server.keys(f"{prefix}*running*")]
        indexes = {name.removeprefix(prefix): await server.zrange(name, 0, -1) for name in names}
        assert indexes == {name: [b"w2"] for name in ("running", "running:t", "created:running", "created:running:t")}


async def test_ids_of_lapsed_records_leave_the_indexes_though_nothing_else_happens(valkey_url: str) -> None:
    async with pool(valkey_url, retention_s=0.05) as (store, server, prefix):
        await asyncio.gather(*(store.create(flow(number)) for number in range(450)))
        await asyncio.gather(*(store.complete(f"w{number}") for number in range(450)))
        await asyncio.sleep(0.2)
        assert await store.listed(None, 20) == ([], False)
        for _ in range(3):
            await store.expire(100)
        indexes = [key for state in store_contract.STATES async for key in server.scan_iter(f"{prefix}*{state}*")]
        assert [key for key in indexes if await server.zcard(key)] == []
        assert await server.hgetall(f"{prefix}sizes") == {}


async def test_a_list_looks_at_a_bounded_number_of_ids(valkey_url: str) -> None:
    async with pool(valkey_url) as (store, server, prefix):
        await store.create(flow(0))
        lapsed = {f"x{number}": 9e12 + number for number in range(5000)}  # newer than the workflow that there is
        await server.zadd(f"{prefix}created:running", lapsed)
        before = (
            (await server.info("commandstats"))["cmdstat_exists"]["calls"] if await store.listed("running", 5) else 0
        )
        rows, more = await store.listed("running", 5)
        looks = (await server.info("commandstats"))["cmdstat_exists"]["calls"] - before
        assert looks <= 2100
        assert (rows, more) == ([], True), "there may be more"
