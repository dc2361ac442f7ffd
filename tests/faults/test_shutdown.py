"""SIGTERM breaks nothing: calls under way finish, new ones are told to go elsewhere, the other gateways learn at once."""

import asyncio
import json
import signal
from typing import Any

import aiohttp
from redis import asyncio as valkey

CALL = {"model": "sim", "prompt": "hello", "max_tokens": 200, "stream": True}


async def test_sigterm_finishes_the_streams_under_way(rig: Any, until: Any, free_port: Any, figure: Any) -> None:
    kept = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    engine = await rig.engine(speed=4)
    gateway = await rig.gateway([engine], kept.url)

    async def stream() -> str:
        async with rig.http.post(gateway.url + "/v1/completions", json=CALL) as response:
            assert response.status == 200
            return await response.text()

    async def draining() -> bool:
        async with rig.http.post(gateway.url + "/v1/completions", json=CALL) as response:
            if response.status == 200:
                return False
            assert response.status == 503
            assert response.headers["x-tidegate-reason"] == "draining"
            assert int(response.headers["Retry-After"]) >= 1
        async with rig.http.get(gateway.url + "/ready") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
        return True

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream()) for _ in range(10)]

        async def under_way() -> bool:
            return await rig.running(engine) == 10

        await until(under_way)
        gateway.child.send_signal(signal.SIGTERM)
        await until(draining)
    broken = sum(not task.result().endswith("data: [DONE]\n\n") for task in streams)
    figure("SIGTERM: streams broken", str(broken), goal="0", met=not broken)
    assert not broken
    assert await asyncio.to_thread(gateway.child.wait, 20) == 0
    store = valkey.Redis.from_url(kept.url)
    owed = await store.hgetall("tidegate:v1:{default}:backlogs")
    assert not any(json.loads(item) for item in owed.values())
    assert not await store.exists("tidegate:v1:{default}:leases")
    await store.aclose()


async def test_a_gateway_that_is_told_to_stop_waits_for_the_store_that_lacks_ends(
    rig: Any, until: Any, free_port: Any, figure: Any
) -> None:
    port, folder = free_port(), rig.folder / "data"
    kept, engine = await rig.valkey(port=port, folder=folder), await rig.engine(speed=4)
    gateway = await rig.gateway([engine], kept.url, timeouts={"drain": "120s"})
    declared = {"deadline_ms": 300_000, "stages": [{"name": "a"}]}
    async with rig.http.post(gateway.url + "/v1/workflows", json=declared) as response:
        flow = (await response.json())["id"]
    headers = {"x-tidegate-workflow": flow, "x-tidegate-stage": "a"}

    async def answered() -> None:
        async with rig.http.post(gateway.url + "/v1/completions", json=CALL, headers=headers) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")

    async def under_way() -> bool:
        return await rig.running(engine) == 1

    async with asyncio.TaskGroup() as group:
        group.create_task(answered())
        await until(under_way)
        kept.kill()
    gateway.child.send_signal(signal.SIGTERM)
    await asyncio.sleep(2)
    assert gateway.child.poll() is None, "the gateway stopped without the end of the call in the store"
    kept = await rig.valkey(port=port, folder=folder)
    assert await asyncio.to_thread(gateway.child.wait, 60) == 0
    store = valkey.Redis.from_url(kept.url)
    record = json.loads(await store.get(f"tidegate:v1:{{default}}:workflow:{flow}"))
    await store.aclose()
    figure("SIGTERM while the store is down: workflows whose end is lost", str(int(record["state"] != "done")), goal="0",
           met=record["state"] == "done")  # fmt: skip
    assert record["state"] == "done"


async def test_a_second_gateway_takes_over_without_a_failed_request(
    rig: Any, until: Any, free_port: Any, figure: Any
) -> None:
    """A rolling restart as a load balancer would see it: it follows /ready."""
    kept = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    engines = [await rig.engine(), await rig.engine()]
    old = await rig.gateway(engines, kept.url, timeouts={"announce": "1s"})
    statuses: list[int] = []
    backends = [old]
    stop = asyncio.Event()

    async def load() -> None:
        while not stop.is_set():
            body = {**CALL, "max_tokens": 8}
            async with rig.http.post(backends[0].url + "/v1/completions", json=body) as response:
                await response.read()
                statuses.append(response.status)

    async def unready() -> bool:
        try:
            async with rig.http.get(old.url + "/ready") as response:
                return response.status == 503
        except aiohttp.ClientError:
            return True

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(load())
        await until(lambda: len(statuses) > 50)
        new = await rig.gateway(engines, kept.url)
        old.child.send_signal(signal.SIGTERM)
        await until(unready)
        backends[0] = new
        before = len(statuses)
        await until(lambda: len(statuses) > before + 50)
        stop.set()
    failed = sum(status != 200 for status in statuses)
    figure("a gateway takes over from one that drains: failed requests", str(failed), goal="0", met=not failed)
    assert not failed
    assert await asyncio.to_thread(old.child.wait, 20) == 0
