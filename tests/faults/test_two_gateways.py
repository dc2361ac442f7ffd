"""Two gateways, one Valkey, 1,000 three-stage workflows; one gateway is killed with streams in flight.

The truth is a ledger on the client's side: every workflow ends exactly once, whatever the dead gateway had promised, and
what it owed the engines is forgotten once its lease has run out.
"""

import asyncio
import collections
import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from redis import asyncio as valkey

WORKFLOWS = 1000
AT_ONCE = 48
STAGES = [{"name": "plan"}, {"name": "draft", "after": ["plan"]}, {"name": "check", "after": ["draft"]}]
LEASE_S = 3.0
PREFIX = "tidegate:v1:{default}:"


@dataclass(slots=True)
class Ledger:
    """What clients saw."""

    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    """Complete answers by workflow and stage."""
    ended: dict[str, int] = field(default_factory=dict)
    """Workflow -> when it ended, as first seen."""
    streaming: collections.Counter[str] = field(default_factory=collections.Counter)
    """Streams under way by gateway."""
    broken: int = 0
    """Streams that broke off, and requests that found nobody."""


class Client:
    """Works through workflows; retries what fails through the other gateway."""

    def __init__(self, http: aiohttp.ClientSession, gateways: list[str], ledger: Ledger, store: valkey.Redis) -> None:
        self.http, self.gateways, self.ledger, self.store = http, gateways, ledger, store

    async def work(self, number: int) -> None:
        turn = itertools.cycle(self.gateways[number % 2 :] + self.gateways[: number % 2])
        key = {"Idempotency-Key": f"flow-{number}"}
        body = {"deadline_ms": 300_000, "stages": STAGES}
        flow = await self.until_answered(turn, "POST", "/v1/workflows", json=body, headers=key)
        for stage in STAGES:
            await self.stage(turn, flow["id"], str(stage["name"]))
        # A last stage whose first call died with its gateway ends when that gateway's lease has run out, not before:
        # until then the call might still come.
        async with asyncio.timeout(LEASE_S + 30):
            while (ended := await self.until_answered(turn, "GET", f"/v1/workflows/{flow['id']}"))[
                "state"
            ] == "running":
                await asyncio.sleep(0.1)
        assert ended["state"] == "done", ended
        assert flow["id"] not in self.ledger.ended
        self.ledger.ended[flow["id"]] = await self.ended_ms(flow["id"])

    async def stage(self, turn: Any, flow: str, stage: str) -> None:
        """One streamed call, repeated until its stream is whole."""
        headers = {"x-tidegate-workflow": flow, "x-tidegate-stage": stage, "Idempotency-Key": f"{flow}/{stage}"}
        body = {"model": "sim", "prompt": "tell me " * 20, "max_tokens": 12, "stream": True}
        while True:
            gateway = next(turn)
            self.ledger.streaming[gateway] += 1
            try:
                async with self.http.post(gateway + "/v1/completions", json=body, headers=headers) as response:
                    text = await response.text()
                if response.status == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text:
                    self.ledger.answers[f"{flow}/{stage}"] += 1
                    return
                assert response.status in (200, 429, 503), (response.status, text)
            except aiohttp.ClientError:
                pass
            finally:
                self.ledger.streaming[gateway] -= 1
            self.ledger.broken += 1
            await asyncio.sleep(0.05)

    async def until_answered(self, turn: Any, method: str, path: str, **options: Any) -> Any:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.http.request(method, next(turn) + path, **options) as response:
                    if response.status < 400:
                        return await response.json()
                    assert response.status == 503, await response.text()
            self.ledger.broken += 1
            await asyncio.sleep(0.05)

    async def ended_ms(self, flow: str) -> int:
        record = json.loads(await self.store.get(f"{PREFIX}workflow:{flow}"))
        assert record["state"] == "done"
        return int(record["ended_ms"])


async def test_every_workflow_ends_exactly_once_although_a_gateway_is_killed(
    rig: Any, until: Any, free_port: Any
) -> None:
    kept = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    engines = [await rig.engine(), await rig.engine()]
    one, two = [await rig.gateway(engines, kept.url) for _ in range(2)]
    ledger, store = Ledger(), valkey.Redis.from_url(kept.url)
    client = Client(rig.http, [one.url, two.url], ledger, store)
    numbers = iter(range(WORKFLOWS))

    async def worker() -> None:
        for number in numbers:
            await client.work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
        await until(lambda: len(ledger.ended) > WORKFLOWS // 4 and ledger.streaming[one.url] > 5, within_s=240)
        one.kill()
        in_flight = ledger.streaming[one.url]

    assert in_flight > 0
    assert ledger.broken >= in_flight, "the kill was noticed"
    assert len(ledger.ended) == WORKFLOWS
    assert set(ledger.answers.values()) == {1}, "the client took each stage's answer once"
    assert len(ledger.answers) == 3 * WORKFLOWS
    assert await store.zcard(f"{PREFIX}done") == WORKFLOWS
    for state in ("running", "cancelled", "expired"):
        assert await store.zcard(PREFIX + state) == 0
    for flow, ended_ms in ledger.ended.items():
        assert await client.ended_ms(flow) == ended_ms, "the terminal state was written once"

    async def forgotten() -> bool:
        owed = await store.hgetall(f"{PREFIX}backlogs")
        return await store.zcard(f"{PREFIX}leases") == 1 and all(json.loads(item) == {} for item in owed.values())

    await until(forgotten)
    assert not await store.keys(f"{PREFIX}calls:*"), "no call of anyone is left"
    for engine in engines:
        assert await rig.running(engine) == 0
    await store.aclose()
