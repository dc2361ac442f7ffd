"""How long one request keeps the store from all others: the longest command of its slow log, for the largest workflows."""

import asyncio
import secrets
from typing import Any

import pytest
from redis import asyncio as valkey

from tidegate_gateway import gateway_settings, stage_declaration
from tidegate_gateway.store import store_contract, valkey_store

pytestmark = pytest.mark.faults

GOAL_MS, MOST_MS = 20.0, 200.0
"""The goal of a quiet machine, and what no machine may exceed."""
AT_ONCE = 64


def largest() -> tuple[stage_declaration.StageDeclaration, ...]:
    """As many stages and names in their lists as a declaration may have."""
    names = [f"s{i}" for i in range(stage_declaration.MOST_STAGES)]
    left = stage_declaration.MOST_RECORD_BYTES - stage_declaration.record_bytes(
        [stage_declaration.StageDeclaration(name=name) for name in names]
    )
    each = left // (len(names[-1]) + 2) // len(names)
    return tuple(
        stage_declaration.StageDeclaration(name=name, after=tuple(names[max(i - each, 0) : i]))
        for i, name in enumerate(names)
    )


async def many(count: int, of: Any) -> None:
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(of(number) for number in range(first, min(first + AT_ONCE, count))))


async def test_no_request_keeps_the_store_from_others(rig: Any, figure: Any, free_port: Any) -> None:
    kept = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    shared = gateway_settings.Store(url=kept.url, pool=secrets.token_hex(4), timeout_s=60.0, retention_s=20.0)
    store, dying = (valkey_store.Valkey(shared, gateway=name) for name in ("g1", "g2"))
    longest: dict[str, float] = {}
    async with valkey.Redis.from_url(kept.url) as server:
        await server.config_set("slowlog-log-slower-than", 500)
        await server.config_set("slowlog-max-len", 100_000)

        async def note(what: str) -> None:
            entries = await server.slowlog_get(100_000)
            longest[what] = max((entry["duration"] / 1000 for entry in entries), default=0.0)
            await server.slowlog_reset()

        stages = largest()
        await server.slowlog_reset()
        await store.create(store_contract.NewWorkflow(id="w", deadline_ms=600_000, stages=stages, tenant="t"))
        for name in (stages[0].name, stages[-1].name):
            await store.complete_stage("w", name)
        await store.complete("w")
        await note("a workflow with the most stages")

        await many(
            store_contract.MOST_CALLS,
            lambda number: dying.join("calls", "a", f"c{number}", deadline_ms=600_000, tenant="t"),
        )
        await note("10,000 calls that join a workflow")
        while not await store.forget("g2", 100):
            pass
        await note("10,000 calls of a dead gateway that are forgotten")

        async def short(number: int) -> None:
            await store.create(store_contract.NewWorkflow(id=f"x{number}", deadline_ms=600_000, tenant="t"))
            await store.complete(f"x{number}")

        await many(5000, short)
        await store.listed(None, 1000)
        await note("5,000 workflows of a tenant, and a list of 1,000")
        await asyncio.sleep(shared.retention_s + 1)
        for _ in range(60):
            await store.expire(100)
        assert await server.zcard(f"tidegate:v1:{{{shared.pool}}}:done") == 0
        await store.listed(None, 1000)
        await note("5,000 workflows that have lapsed")
    for each in (store, dying):
        await each.close()
    for what, milliseconds in longest.items():
        figure(f"the longest command of the store, {what}, ms", f"{milliseconds:.1f}",
               goal=f"at most {GOAL_MS:.0f}", met=milliseconds <= GOAL_MS)  # fmt: skip
    assert max(longest.values()) < MOST_MS, longest
