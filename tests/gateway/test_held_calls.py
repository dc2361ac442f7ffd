"""Calls of a pool without engines, for which an autoscaler starts an engine."""

import asyncio
from typing import Any

import fake_engine


async def test_a_call_waits_while_no_engine_exists_and_is_served_by_the_first_one(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(healthy=False) as engine,
        up(engine, seen=False, store=False, queue={"hold": "60s", "ttl": "100ms"}) as client,
        asyncio.TaskGroup() as group,
    ):
        status, answer, _ = await client.send("GET", "/ready")
        assert status == 200, "the gateway takes calls"
        call = group.create_task(client.ask())
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        async with client.http.get(client.admin_url + "/admin/state") as response:
            state = await response.json()
        assert state["load"]["waiting"]["calls"] == state["load"]["offered"]["calls"] == 1
        assert state["load"]["waiting"]["prompt_tokens"] > 0
        assert any("they wait until one is started" in reason for reason in state["reasons"]), answer
        await asyncio.sleep(0.2)  # longer than the ttl, which counts while engines exist
        assert not call.done()
        engine.healthy = True
        assert (await call)[0] == 200
        async with client.http.get(client.admin_url + "/admin/state") as response:
            assert (await response.json())["load"]["waiting"]["calls"] == 0


async def test_a_held_call_is_shed_at_its_deadline_or_after_the_time_for_holding(up: Any) -> None:
    async with up(store=False, queue={"hold": "300ms", "ttl": "100ms"}) as client:
        status, answer, _ = await client.ask()
        assert (status, answer["error"]["code"]) == (503, "no-engines")
    async with up(store=False, queue={"hold": "60s"}) as client:
        status, answer, _ = await client.ask(headers={"x-tidegate-deadline-ms": "200"})
        assert (status, answer["error"]["code"]) == (503, "no-engines")
