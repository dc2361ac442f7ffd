"""Clients that work through workflows of three stages, and a ledger of what they saw. They repeat what fails, as an agent's
library does, with the same idempotency keys."""

import asyncio
import collections
import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from redis import asyncio as valkey
from redis import exceptions

STAGES = [{"name": "plan"}, {"name": "draft", "after": ["plan"]}, {"name": "check", "after": ["draft"]}]
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
    again: int = 0
    """Workflows that were worked through again, because the store had forgotten something of them."""
    broken: int = 0
    """Streams that broke off, and requests that found nobody."""


class Client:
    """Works through workflows; repeats what fails at the next gateway."""

    PATIENCE_S = 60.0
    """For the end of a workflow whose last call died with its gateway: it comes when that gateway's lease has run out."""

    def __init__(self, http: aiohttp.ClientSession, gateways: list[str], ledger: Ledger, store: valkey.Redis) -> None:
        self.http, self.gateways, self.ledger, self.store = http, gateways, ledger, store

    async def work(self, number: int) -> None:
        first = number % len(self.gateways)
        turn = itertools.cycle(self.gateways[first:] + self.gateways[:first])
        flow = await self.begun(turn, number)
        for stage in STAGES:
            await self.stage(turn, flow, str(stage["name"]))
        # A last stage whose first call died with its gateway ends when that gateway's lease has run out, not before:
        # until then the call might still come.
        async with asyncio.timeout(self.PATIENCE_S):
            while (ended := await self.until_answered(turn, "GET", f"/v1/workflows/{flow}"))["state"] == "running":
                await asyncio.sleep(0.1)
        assert ended["state"] == "done", ended
        assert flow not in self.ledger.ended
        self.ledger.ended[flow] = await self.ended_ms(flow)

    async def begun(self, turn: Any, number: int) -> str:
        """The id of the workflow of this number, which is created unless it exists."""
        key = {"Idempotency-Key": f"flow-{number}"}
        body = {"deadline_ms": 300_000, "stages": STAGES}
        return str((await self.until_answered(turn, "POST", "/v1/workflows", json=body, headers=key))["id"])

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
                self.check(response.status, text)
            except aiohttp.ClientError:
                pass
            finally:
                self.ledger.streaming[gateway] -= 1
            self.ledger.broken += 1
            await asyncio.sleep(0.05)

    def check(self, status: int, text: str) -> None:
        """Whether a client repeats a request with such an answer."""
        assert status in (200, 429, 503), (status, text)

    async def until_answered(self, turn: Any, method: str, path: str, **options: Any) -> Any:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.http.request(method, next(turn) + path, **options) as response:
                    if response.status < 400:
                        return await response.json()
                    self.check(response.status, await response.text())
            self.ledger.broken += 1
            await asyncio.sleep(0.05)

    async def ended_ms(self, flow: str) -> int:
        while True:
            with contextlib.suppress(exceptions.ConnectionError):  # the store may be down
                record = json.loads(await self.store.get(f"{PREFIX}workflow:{flow}"))
                break
            await asyncio.sleep(0.1)
        assert record["state"] == "done"
        return int(record["ended_ms"])


class _Forgotten(Exception):
    """The store does not have a workflow, or not all ends of its calls."""


class ForgivingClient(Client):
    """A client of a store that may lose what it acknowledged: it begins a workflow again that the store does not know, and
    repeats the stages of one that goes on although all its answers have come."""

    PATIENCE_S = 5.0

    async def work(self, number: int) -> None:
        while True:
            try:
                await super().work(number)
            except (_Forgotten, TimeoutError):
                self.ledger.again += 1
            else:
                return

    def check(self, status: int, text: str) -> None:
        if status in (404, 409):
            raise _Forgotten(text)
        super().check(status, text)

    async def ended_ms(self, flow: str) -> int:
        return 0  # the store may have forgotten it since


async def work_all(client: Client, count: int, *, at_once: int) -> None:
    """Works through `count` workflows, so many at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await client.work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
