"""What the other gateways know of one that leaves: its calls until they have ended, then nothing."""

import asyncio
import dataclasses
import logging
import secrets
from typing import Any

import aiohttp
import pytest
from redis import asyncio as valkey

import fake_engine
from tidegate_gateway.store import store_contract, valkey_store

LEASE_S = 0.5


async def test_a_gateway_that_drains_is_counted_until_its_calls_have_ended_and_gone_right_after(
    up: Any, until: Any, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool, options = secrets.token_hex(4), {"lease": f"{LEASE_S}s"}
    server = valkey.Redis.from_url(valkey_url)
    leases = f"tidegate:v1:{{{pool}}}:leases"
    with caplog.at_level(logging.WARNING, logger="tidegate.gateway"):
        async with (
            aiohttp.ClientSession() as http,
            fake_engine.engine(hang_after=1) as engine,
            up(engine, pool=pool, store_options=options) as peer,
        ):

            async def ask(url: str) -> None:
                body = {"model": "fake", "prompt": "x", "stream": True}
                async with http.post(url + "/v1/completions", json=body) as response:
                    await response.read()

            def seen() -> Any:
                (state,) = [engine.facts for engine in peer.gateway.core.engines]
                return state.others.calls

            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as group:
                async with up(
                    engine, pool=pool, store_options=options, timeouts={"drain": f"{3 * LEASE_S}s"}
                ) as leaving:
                    group.create_task(ask(leaving.url))
                    await until(seen)
                    (left,) = {name.decode() for name in await server.zrange(leases, 0, -1)} - {
                        peer.gateway.link.store.gateway
                    }

                    async def watch() -> None:
                        await until(lambda: leaving.gateway.draining)
                        over_s = loop.time() + 2 * LEASE_S
                        while loop.time() < over_s:
                            assert seen() == 1
                            await asyncio.sleep(0.02)

                    group.create_task(watch())
                    # Its listener waits for this connection's request, while nothing else is left to do.
                    _, silent = await asyncio.open_connection(*leaving.url.removeprefix("http://").split(":"))
                assert await server.zscore(leases, left) is None
                silent.close()
            await until(lambda: seen() == 0)
    assert "is gone" not in caplog.text
    await server.aclose()


async def test_a_slow_goodbye_to_a_dead_gateway_is_no_outage(
    up: Any, until: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, asked = valkey_store.Valkey.exchange, list[str]()

    async def with_a_dead_one(self: Any, *told: Any) -> Any:
        return dataclasses.replace(await exchange(self, *told), dead=("dead",))

    async def slow(self: Any, gateway: str, limit: int) -> bool:
        asked.append(gateway)
        raise store_contract.Slow("the store does not answer")

    monkeypatch.setattr(valkey_store.Valkey, "exchange", with_a_dead_one)
    monkeypatch.setattr(valkey_store.Valkey, "forget", slow)
    async with up(store_options={"sync": "20ms"}) as gateway:
        await until(lambda: len(asked) >= 3)
        assert gateway.gateway.link.up
    assert "shed until the store answers" not in caplog.text
