"""Engines, a gateway and the store are killed every few seconds, while clients keep a ledger of what was acknowledged."""

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

SOAK_S = 60 * float(os.environ.get("SOAK_MINUTES", "30"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(SOAK_S + 600)]

CLIENTS, STAGES = 8, ("plan", "draft", "check")
DEADLINE_MS = 600_000
"""So long that no workflow expires, however slowly a machine starts a gateway whose journal has the end of a call."""
PATIENCE_S = 240.0
"""Time in which a request is repeated, and in which an acknowledged end must be recorded."""
KILL_S = (2.0, 6.0)
"""Seconds that a killed process runs before it is killed again. One engine and one gateway are not killed."""


@dataclass(slots=True)
class Ledger:
    """What clients were told."""

    workflows: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    """Workflows that are not done although all their calls were acknowledged, or that count a call twice."""
    late: int = 0
    """Workflows that were done before the end of one of their calls had left the journal, so that its stage counts 0."""
    longest_s: float = 0.0
    """Longest time from the acknowledgement of a workflow's last call until the workflow was done."""
    kills: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Answers that no client should get, by status and code."""


class Client:
    """Runs one workflow after the other, and repeats each request with its key until it is acknowledged."""

    def __init__(self, http: aiohttp.ClientSession, gateways: list[Any], ledger: Ledger) -> None:
        self._http, self._gateways, self._ledger = http, gateways, ledger

    async def run(self, name: str, until_s: float) -> None:
        number = 0
        while time.monotonic() < until_s:
            number += 1
            await self._workflow(f"{name}-{number}", in_order=bool(number % 2))
            await asyncio.sleep(0.05)

    async def _workflow(self, flow: str, *, in_order: bool) -> None:
        """Without an order no stage ends an earlier one, so the workflow is done only if each end was recorded."""
        stages = [
            {"name": stage, "after": list(STAGES[:at][-1:]) if in_order else []} for at, stage in enumerate(STAGES)
        ]
        created = {"id": flow, "deadline_ms": DEADLINE_MS, "stages": stages}
        if await self._insist("POST", "/v1/workflows", created, {"idempotency-key": flow}) is None:
            return
        self._ledger.workflows += 1
        for stage in STAGES:
            headers = {"x-tidegate-workflow": flow, "x-tidegate-stage": stage, "idempotency-key": f"{flow}-{stage}"}
            body = {"model": "sim", "prompt": "hello", "max_tokens": 8}
            if await self._insist("POST", "/v1/completions", body, headers) is None:
                return
            self._ledger.acknowledged += 1
        acknowledged_at_s = time.monotonic()
        while True:
            record = await self._insist("GET", f"/v1/workflows/{flow}")
            waited_s = time.monotonic() - acknowledged_at_s
            if not record or record["state"] == "done" or waited_s > PATIENCE_S:
                break
            await asyncio.sleep(0.2)  # the end of a call may wait in the journal of the gateway that was killed
        self._ledger.longest_s = max(self._ledger.longest_s, waited_s)
        calls = record and [stage["calls_done"] for stage in record["stages"]]
        if not record or record["state"] != "done" or max(calls) > 1:
            self._ledger.lost.append(f"{flow}: {calls} in {record and record['state']} after {waited_s:.0f} s")
        elif min(calls) < 1:
            self._ledger.late += 1

    async def _insist(self, method: str, path: str, body: Any = None, headers: Any = None) -> Any:
        """The answer; None if the workflow's time is over."""
        until_s = time.monotonic() + PATIENCE_S
        turn = random.randrange(2)
        while time.monotonic() < until_s:
            turn += 1
            url = self._gateways[turn % len(self._gateways)].url + path
            try:
                async with self._http.request(method, url, json=body, headers=headers) as response:
                    answer = await response.json()
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.1)
                continue
            if response.status < 300:
                return answer
            if response.status in (429, 502, 503, 504):
                await asyncio.sleep(0.1)
                continue
            self._ledger.errors[f"{response.status} {answer.get('error', {}).get('code')}"] += 1
            return None
        self._ledger.errors[f"{method} {path.split('/')[2]} was not answered in {PATIENCE_S} s"] += 1
        return None


async def test_kills_every_few_seconds_lose_nothing_and_leave_nothing_behind(
    rig: Any, until: Any, free_port: Any, figure: Any
) -> None:
    rng = random.Random(20)
    ports = [free_port() for _ in range(3)]
    store_port, folder = free_port(), rig.folder / "data"
    store = await rig.valkey(port=store_port, folder=folder)
    engines = [await rig.engine(port=port) for port in ports]

    def shared(name: str) -> dict[str, Any]:
        journal = str(rig.folder / f"{name}.jsonl")
        return {"url": store.url, "sync": "100ms", "lease": "3s", "retention": "10m", "journal": journal}

    steady = await rig.gateway(engines, store.url, store=shared("steady"))
    killed_port = free_port()
    gateways = [steady, await rig.gateway(engines, store.url, store=shared("killed"), port=killed_port)]
    ledger = Ledger()
    until_s = time.monotonic() + SOAK_S
    memory: list[tuple[int, int]] = []
    first_tasks = await rig.tasks(steady)

    async def next_kill(kind: str) -> bool:
        await asyncio.sleep(rng.uniform(*KILL_S))
        ledger.kills[kind] += time.monotonic() < until_s
        return time.monotonic() < until_s

    async def kill_engine(which: int) -> None:
        while await next_kill("engines"):
            engines[which].kill()
            engines[which] = await rig.engine(port=ports[which])

    async def kill_gateway() -> None:
        while await next_kill("gateways"):
            gateways[1].kill()
            gateways[1] = await rig.gateway(engines, store.url, store=shared("killed"), port=killed_port)

    async def kill_store() -> None:
        nonlocal store
        while await next_kill("stores"):
            store.kill()
            await asyncio.sleep(rng.uniform(0, 2))
            store = await rig.valkey(port=store_port, folder=folder)

    async def watch() -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(SOAK_S / 40)
            memory.append((steady.memory, steady.open_files))

    async with asyncio.TaskGroup() as group:
        group.create_task(kill_engine(0))
        group.create_task(kill_engine(1))
        group.create_task(kill_gateway())
        group.create_task(kill_store())
        group.create_task(watch())
        for number in range(CLIENTS):
            group.create_task(Client(rig.http, gateways, ledger).run(f"c{number}", until_s))

    quarter = len(memory) // 4
    early, late = (max(rss for rss, _ in part) for part in (memory[:quarter], memory[-quarter:]))
    growth = late / early - 1
    await asyncio.sleep(15)  # idle connections to engines close
    left, left_tasks = steady.open_files, await rig.tasks(steady)
    figure("soak: kills", ", ".join(f"{count} {kind}" for kind, count in ledger.kills.items()), goal="-", met=True)
    figure("soak: workflows, calls acknowledged", f"{ledger.workflows}, {ledger.acknowledged}", goal="-", met=True)
    figure("soak: calls lost or counted twice", str(len(ledger.lost)), goal="0", met=not ledger.lost)
    figure("soak: workflows done before an end was recorded", str(ledger.late), goal="-", met=True)
    figure("soak: longest wait for the end of a workflow", f"{ledger.longest_s:.0f} s", goal="-", met=True)
    figure("soak: errors that are no retry", str(dict(ledger.errors) or 0), goal="0", met=not ledger.errors)
    figure("soak: memory of the gateway that lives", f"{growth:+.1%}", goal="below +10%", met=growth < 0.1)
    figure(
        "soak: its open files, first and idle", f"{memory[0][1]}, {left}", goal="no more", met=left <= memory[0][1] + 8
    )
    no_more = left_tasks <= first_tasks + 8
    figure("soak: its tasks, first and idle", f"{first_tasks}, {left_tasks}", goal="no more", met=no_more)
    assert not ledger.lost, ledger.lost[:5]
    assert not ledger.errors
    assert ledger.workflows > SOAK_S / 10, "the clients were served"
    assert ledger.acknowledged == len(STAGES) * ledger.workflows
    assert all(ledger.kills[kind] > SOAK_S / 100 for kind in ("engines", "gateways", "stores"))
    assert growth < 0.25
    assert left <= memory[0][1] + 8
    assert no_more
