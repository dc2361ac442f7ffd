"""A store that has lost writes is noticed at the next exchange, and nothing else counts as a loss."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from test_store import store_settings

from tidegate_gateway.store import known_leases, valkey_store

LEASE_MS = 500


@pytest.fixture
async def two(valkey_url: str) -> AsyncIterator[tuple[valkey_store.Valkey, valkey_store.Valkey]]:
    shared = store_settings(valkey_url, lease_s=LEASE_MS / 1000)
    both = valkey_store.Valkey(shared, gateway="g1"), valkey_store.Valkey(shared, gateway="g2")
    yield both
    for one in both:
        await one.close()


async def test_an_older_lease_is_a_loss_once(two: Any) -> None:
    one, _ = two
    assert (await one.exchange({})).lost_s is None
    assert (await one.exchange({})).lost_s is None
    until_ms = await one.client.zscore(one.key("leases"), "g1")
    await one.client.zadd(one.key("leases"), {"g1": until_ms - 3000})
    assert (await one.exchange({})).lost_s == 3.0
    assert (await one.exchange({})).lost_s is None


async def test_an_empty_store_has_lost_all(two: Any) -> None:
    one, other = two
    for _ in range(2):
        await one.exchange({})
        await other.exchange({})
        await asyncio.sleep(0.05)
    await one.client.delete(one.key("leases"))
    assert (await one.exchange({})).lost_s >= 0.05
    assert (await other.exchange({})).lost_s >= 0.05
    assert (await other.exchange({})).lost_s is None


async def test_an_empty_store_has_lost_all_after_the_lease_has_ended_too(two: Any) -> None:
    one, _ = two
    await one.exchange({})
    await one.client.delete(one.key("leases"))
    await asyncio.sleep(1.2 * LEASE_MS / 1000)
    assert (await one.exchange({})).lost_s is not None


async def test_a_lease_that_another_gateway_has_removed_is_no_loss(two: Any) -> None:
    one, other = two
    await one.exchange({})
    async with asyncio.timeout(10):
        while "g1" not in (await other.exchange({})).dead:
            await asyncio.sleep(0.05)
    await other.forget("g1", 10)
    assert (await one.exchange({})).lost_s is None


def test_an_exchange_whose_answer_never_came_is_no_loss() -> None:
    known = known_leases.KnownLeases()
    told = {"lease_ms": LEASE_MS, "others": 0}
    assert known.lost_s(now_ms=1000, before_ms=0, **told) is None
    assert known.lost_s(now_ms=1200, before_ms=1100 + LEASE_MS, **told) is None
