"""Three gateways, one Valkey, 1,000 workflows of three stages; one gateway is killed with streams in flight.

The truth is a ledger on the client's side: every workflow ends exactly once, whatever the dead gateway had promised, and
what it owed the engines is forgotten once its lease has run out. `make faults` has 200 streams in flight.
"""

import asyncio
import json
import os
import time
from typing import Any

import workflow_ledger
from redis import asyncio as valkey

IS_FULL = "TIDEGATE_FAULTS" in os.environ
WORKFLOWS = 1000
AT_ONCE = 240 if IS_FULL else 48
GATEWAYS = 3
FORGOTTEN_S, CANCELLED_S = 10.0, 5.0
"""Goals: the others know that it is gone, by its lease; its streams have left the engines."""
PREFIX = workflow_ledger.PREFIX


async def test_every_workflow_ends_exactly_once_although_a_gateway_is_killed(
    rig: Any, until: Any, free_port: Any, figure: Any
) -> None:
    kept = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    engines = [await rig.engine(), await rig.engine()]
    gateways = [await rig.gateway(engines, kept.url) for _ in range(GATEWAYS)]
    ledger, store = workflow_ledger.Ledger(), valkey.Redis.from_url(kept.url)
    client = workflow_ledger.Client(rig.http, [one.url for one in gateways], ledger, store)
    dead = gateways[0]

    async def dead_streams_are_gone() -> bool:
        running = sum([await rig.running(engine) for engine in engines])
        return bool(running <= sum(ledger.streaming[one.url] for one in gateways[1:]))

    async def forgotten() -> bool:
        return bool(await store.zcard(f"{PREFIX}leases") == GATEWAYS - 1)

    async with asyncio.TaskGroup() as group:
        group.create_task(workflow_ledger.work_all(client, WORKFLOWS, at_once=AT_ONCE))
        enough = AT_ONCE // GATEWAYS // 2
        await until(lambda: len(ledger.ended) > WORKFLOWS // 4 and ledger.streaming[dead.url] > enough, within_s=240)
        dead.kill()
        killed_s, in_flight, everywhere = time.monotonic(), ledger.streaming[dead.url], ledger.streaming.total()
        await until(dead_streams_are_gone)
        cancelled_s = time.monotonic() - killed_s
        await until(forgotten)
        forgotten_s = time.monotonic() - killed_s

    assert in_flight > 0
    assert ledger.broken >= in_flight, "the kill was noticed"
    assert len(ledger.ended) == WORKFLOWS
    twice = sum(count != 1 for count in ledger.answers.values())
    assert not twice, "the client took each stage's answer once"
    assert len(ledger.answers) == 3 * WORKFLOWS
    assert await store.zcard(f"{PREFIX}done") == WORKFLOWS
    for state in ("running", "cancelled", "expired"):
        assert await store.zcard(PREFIX + state) == 0
    for flow, ended_ms in ledger.ended.items():
        assert await client.ended_ms(flow) == ended_ms, "the terminal state was written once"
    owed = await store.hgetall(f"{PREFIX}backlogs")
    assert all(json.loads(item) == {} for item in owed.values())
    assert not await store.keys(f"{PREFIX}calls:*"), "no call of anyone is left"
    for engine in engines:
        assert await rig.running(engine) == 0
    name = f"one of {GATEWAYS} gateways killed, {everywhere} streams in flight"
    figure(f"{name}: workflows that ended once", f"{len(ledger.ended)}", goal=f"{WORKFLOWS}", met=True)
    figure(f"{name}: its streams have left the engines after, s", f"{cancelled_s:.1f}", goal=f"{CANCELLED_S:g}",
           met=cancelled_s <= CANCELLED_S)  # fmt: skip
    figure(f"{name}: its lease is forgotten after, s", f"{forgotten_s:.1f}", goal=f"{FORGOTTEN_S:g}",
           met=forgotten_s <= FORGOTTEN_S)  # fmt: skip
    await store.aclose()
