"""Load on a gateway for pictures: workflows of four stages and single calls of two classes and three tenants."""

import asyncio
import random
from collections.abc import Coroutine

import aiohttp

CALM_S, BUSY_S = 0.9, 0.3
"""Between two workflows; a busy time comes after the first third."""
BUSY = (0.33, 0.5)
"""Its begin and its end, as parts of the whole."""
SETTINGS = """
classes:
- {name: chat, ttft: 1s, deadline: 6s, weight: 4}
- {name: batch, deadline: 60s, sheddable: true}
tenants:
- {name: search, weight: 3}
- {name: reports}
"""
STAGES = (("link", 1), ("candidates", 3), ("correct", 2), ("evaluate", 1))


class Load:
    """Clients of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, duration_s: float) -> None:
        """Starts workflows and single calls."""
        loop = asyncio.get_running_loop()
        began, number = loop.time(), 0
        while (passed_s := loop.time() - began) < duration_s:
            number += 1
            self._start(self._workflow(f"sql-{number:03d}"))
            for _ in range(3):
                self._start(self._call(self._single(), self._random.randint(20, 400)))
            await asyncio.sleep(
                self._random.uniform(0.5, 1.5) * (BUSY_S if BUSY[0] < passed_s / duration_s < BUSY[1] else CALM_S)
            )

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A call may break off when the gateway stops."""
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

    def _single(self) -> dict[str, str]:
        return {
            "x-tidegate-class": self._random.choice(["chat", "chat", "batch"]),
            "x-tidegate-tenant": self._random.choice(["search", "reports", "support"]),
        }

    async def _workflow(self, name: str) -> None:
        headers = {
            "x-tidegate-workflow": name,
            "x-tidegate-tenant": self._random.choice(["search", "search", "reports"]),
            "x-tidegate-deadline-ms": str(self._random.choice([6000, 10_000, 20_000])),
        }
        for stage, parallel in STAGES:
            of_stage = headers | {"x-tidegate-stage": stage}
            await asyncio.gather(*(self._call(of_stage, self._random.randint(40, 160)) for _ in range(parallel)))
        own = {"x-tidegate-tenant": headers["x-tidegate-tenant"]}
        async with self._session.post(f"{self._url}/v1/workflows/{name}/complete", headers=own) as answer:
            await answer.read()

    async def _call(self, headers: dict[str, str], tokens: int) -> None:
        prompt = "Which customers bought most last year? " * self._random.randint(4, 60)
        body = {"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
