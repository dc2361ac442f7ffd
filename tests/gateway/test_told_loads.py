"""What gateways tell each other of tenants, through a real store."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from tidegate_gateway import gateway_settings
from tidegate_gateway.store import store_contract, valkey_store
from tidegate_policy.admit.tenant_load import NO_LOAD, PoolLoad, TenantLoad


@pytest.fixture
async def stores(valkey_url: str) -> AsyncIterator[list[store_contract.Store]]:
    """The store as the gateways of one pool see it."""
    settings = gateway_settings.Store(url=valkey_url, pool=secrets.token_hex(4), timeout_s=5.0, lease_s=0.5)
    found = [valkey_store.Valkey(settings, gateway=name) for name in ("g1", "g2", "g3")]
    yield list(found)
    for one in found:
        await one.close()


async def test_what_tenants_have_is_shared_and_lapses_with_the_lease(stores: list[store_contract.Store]) -> None:
    one, other, third = stores
    load = PoolLoad(
        {"a": TenantLoad(3, 1, 2.0, 0.5), "b": TenantLoad(0, 5, 1.0, 0.0)},
        40.0,
        {"part": {"a": TenantLoad(2, 0, 2.0, 0.0)}},
    )
    less = PoolLoad({"a": TenantLoad(1, 0, 2.0, 0.25)}, 20.0, {"part": {"a": TenantLoad(3, 0, 2.0, 0.0)}})
    await one.exchange({}, load)
    assert (await other.exchange({}, less)).tenants == load
    assert (await one.exchange({}, load)).tenants == less
    assert (await third.exchange({})).tenants == PoolLoad(
        {"a": TenantLoad(4, 1, 2.0, 0.75), "b": TenantLoad(0, 5, 1.0, 0.0)},
        30.0,
        {"part": {"a": TenantLoad(5, 0, 2.0, 0.0)}},
    )
    await other.leave()
    await third.leave()
    assert (await one.exchange({}, load)).tenants == NO_LOAD
    async with asyncio.timeout(10):
        while (await other.exchange({})).tenants != NO_LOAD:
            await asyncio.sleep(0.02)
