"""A relQuery with as many rows as the default allows runs through the store, the stream and two resumes, in bounded memory.

`make test` runs thousands of rows, `make faults` 100,000. The engine's ledger shows that each row ran once, the client's
that each result came once.
"""

import asyncio
import json
import os
import re
from typing import Any

import aiohttp
import pytest

import fake_engine

IS_FULL = "TIDEGATE_FAULTS" in os.environ
ROWS = 100_000 if IS_FULL else 3_000
MIB = 1024 * 1024
MOST_MIB = 32
"""The upload of 100,000 rows is 0.6 MB, and its rows go to the store in slices."""
LOOK_S = 0.1

pytestmark = pytest.mark.timeout(2400 if IS_FULL else 300)


class Sent(list[Any]):
    """Counts the rows that reach the engine, and keeps no body."""

    def __init__(self) -> None:
        super().__init__()
        self.times = bytearray(ROWS)

    def append(self, body: Any) -> None:
        found = re.fullmatch(r"Row (\d+)\.", body["messages"][0]["content"])
        assert found is not None
        self.times[int(found[1])] += 1


class Results:
    """What the client has read, over several connections."""

    def __init__(self) -> None:
        self.times = bytearray(ROWS)
        self.last_id = 0
        self.name = self.status = ""

    async def read(self, response: aiohttp.ClientResponse, enough: int) -> None:
        """Reads results until there are enough, and hangs up; or to the end."""
        assert response.status == 200, await response.text()
        self.name = response.headers.get("x-tidegate-relquery", self.name)
        async for line in response.content:
            if line.startswith(b"id: "):
                self.last_id = int(line[4:])
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["object"] == "relquery.row":
                    assert event.get("error") is None, event
                    self.times[event["row"]] += 1
                    if self.last_id >= enough:
                        return
                elif event["object"] == "relquery":
                    self.status = event["status"]


def form() -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in (("model", "fake"), ("template", "Row {{n}}."), ("max_tokens", "1")):
        data.add_field(name, value)
    table = "n\n" + "".join(f"{row}\n" for row in range(ROWS))
    data.add_field("rows", table.encode(), filename="rows.csv", content_type="text/csv")
    return data


async def test_a_relquery_of_very_many_rows_ends_in_bounded_memory(rig: Any, free_port: Any, figure: Any) -> None:
    store = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    async with fake_engine.engine(tokens=1) as engine:
        engine.bodies = sent = Sent()
        gateway = await rig.gateway([engine], store.url)
        assert (await rig.http.get(gateway.url + "/health")).status == 200
        before, most = gateway.memory, 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, gateway.memory)
                await asyncio.sleep(LOOK_S)

        watching = asyncio.create_task(watch())
        results, wait = Results(), aiohttp.ClientTimeout(total=None)
        async with rig.http.post(gateway.url + "/v1/relqueries", data=form(), timeout=wait) as response:
            await results.read(response, ROWS // 3)
        for enough in (2 * ROWS // 3, ROWS + 1):
            url = f"{gateway.url}/v1/relqueries/{results.name}/rows"
            async with rig.http.get(url, headers={"Last-Event-ID": str(results.last_id)}, timeout=wait) as response:
                await results.read(response, enough)
        watching.cancel()
        grown = (most - before) / MIB
    assert results.status == "completed"
    assert set(results.times) == {1}, "each result came once"
    assert set(sent.times) == {1}, "each row ran once"
    figure(
        f"{ROWS:,} rows: MiB that the gateway grew", f"{grown:.0f}", goal=f"at most {MOST_MIB}", met=grown <= MOST_MIB
    )
    assert grown <= MOST_MIB
