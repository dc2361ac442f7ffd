"""A gateway is killed in the middle of a relQuery: another one goes on, and no finished row is lost or runs again.

Two ledgers tell the truth: the client's has each row as it came, the engine's has each row as it was sent. A row that was
under way at the kill may run twice. A row whose result the store had runs once.
"""

import asyncio
import collections
import json
import re
import signal
from typing import Any

import aiohttp
import pytest
import workflow_ledger
from redis import asyncio as valkey

import fake_engine

ROWS = 240
PATH = "/v1/relqueries"
BODY = {
    "model": "fake",
    "template": "Row {{n}}.",
    "rows": [{"n": n} for n in range(ROWS)],
    "max_tokens": 4,
    "temperature": 0,
}
SETTINGS = {"relqueries": {"window": 16}, "timeouts": {"drain": "5s"}}


class Ledger:
    """What the client saw."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.rows: list[int] = []
        self.last_id = 0
        self.name = ""
        self.status = ""

    async def submit(self, url: str, enough: int) -> None:
        """Submits the relQuery and reads rows until there are enough."""
        async with self.http.post(url + PATH, json=BODY, headers={"Idempotency-Key": "one"}) as response:
            self.name = response.headers["x-tidegate-relquery"]
            await self._read(response, enough)

    async def resume(self, url: str) -> None:
        """Reads the rest of the rows, as a client does: it asks again while the store does not answer."""
        while self.status != "completed":
            headers = {"Last-Event-ID": str(self.last_id)}
            async with self.http.get(f"{url}{PATH}/{self.name}/rows", headers=headers) as response:
                assert response.status in (200, 503), await response.text()
                if response.status == 200:
                    await self._read(response, ROWS)
                else:
                    await asyncio.sleep(0.5)

    async def _read(self, response: aiohttp.ClientResponse, enough: int) -> None:
        async for line in response.content:
            if line.startswith(b"id: "):
                self.last_id = int(line[4:])
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "object" not in event:
                    assert event["error"]["code"] == "store-unavailable", event
                    return
                if event["object"] == "relquery.row":
                    assert event.get("error") is None, event
                    self.rows.append(event["row"])
                    if len(self.rows) >= enough != ROWS:
                        return
                elif event["object"] == "relquery":
                    self.status = event["status"]


def sent(engine: fake_engine.FakeEngine) -> collections.Counter[int]:
    """How often each row was sent to the engine."""
    found = (re.fullmatch(r"Row (\d+)\.", body["messages"][0]["content"]) for body in engine.bodies)
    return collections.Counter(int(match[1]) for match in found if match)


async def recorded(store_url: str, name: str) -> list[int]:
    """The rows whose results the store has."""
    async with valkey.Redis.from_url(store_url) as store:
        results = await store.lrange(f"{workflow_ledger.PREFIX}relquery:results:{name}", 0, -1)
    return [json.loads(result)["row"] for result in results]


@pytest.mark.parametrize("restarted", [False, True], ids=["another gateway goes on", "a new gateway goes on"])
async def test_no_finished_row_is_lost_or_runs_again_after_a_gateway_is_killed(
    rig: Any, free_port: Any, until: Any, restarted: bool
) -> None:
    store = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    async with fake_engine.engine(token_s=0.02) as engine:
        one = await rig.gateway([engine], store.url, **SETTINGS)
        two = None if restarted else await rig.gateway([engine], store.url, **SETTINGS)
        ledger = Ledger(rig.http)
        await ledger.submit(one.url, 60)
        one.kill()
        await until(lambda: engine.running == 0)
        under_way = set(sent(engine))
        finished = await recorded(store.url, ledger.name)  # before a new gateway may go on
        two = two or await rig.gateway([engine], store.url, **SETTINGS)
        assert 60 <= len(finished) < ROWS
        under_way -= set(finished)
        assert under_way, "rows were under way at the kill"
        await ledger.resume(two.url)

        assert ledger.status == "completed"
        assert sorted(ledger.rows) == list(range(ROWS)), "each row came once"
        assert ledger.rows[: len(finished)] == finished, "results that the store had stay as they are"
        runs = sent(engine)
        assert {runs[row] for row in finished} == {1}, "no finished row ran again"
        assert {row for row, count in runs.items() if count > 1} <= under_way
        assert max(runs.values()) <= 2
        ledger_again = Ledger(rig.http)
        await ledger_again.submit(two.url, ROWS)
        assert ledger_again.name == ledger.name, "the same Idempotency-Key is the same relQuery after the kill"
        assert ledger_again.rows == ledger.rows


async def test_a_gateway_that_slept_beyond_its_lease_disturbs_nothing(rig: Any, free_port: Any, until: Any) -> None:
    store = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    async with fake_engine.engine(token_s=0.02) as engine:
        one, two = [await rig.gateway([engine], store.url, **SETTINGS) for _ in range(2)]
        ledger = Ledger(rig.http)
        await ledger.submit(one.url, 50)
        one.pause()
        finished = await recorded(store.url, ledger.name)

        async def taken_over() -> bool:
            return len(await recorded(store.url, ledger.name)) > len(finished) + 20

        await until(taken_over)
        one.resume()
        await ledger.resume(two.url)
        assert sorted(ledger.rows) == list(range(ROWS))
        runs = sent(engine)
        assert {runs[row] for row in finished} == {1}
        assert sum(runs.values()) <= ROWS + 2 * 16


async def test_a_gateway_that_drains_finishes_its_rows_and_hands_over_the_rest(
    rig: Any, free_port: Any, until: Any
) -> None:
    store = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    async with fake_engine.engine(token_s=0.02) as engine:
        one, two = [await rig.gateway([engine], store.url, **SETTINGS) for _ in range(2)]
        ledger = Ledger(rig.http)
        await ledger.submit(one.url, 50)
        one.child.send_signal(signal.SIGTERM)
        await until(lambda: one.child.poll() is not None)
        await ledger.resume(two.url)
        assert sorted(ledger.rows) == list(range(ROWS))
        assert set(sent(engine).values()) == {1}, "no row ran twice"
