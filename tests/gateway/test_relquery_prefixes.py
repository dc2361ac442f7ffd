"""The rows of a relQuery share the beginning of their prompts, and go to the engine that holds it."""

import asyncio
import collections
from typing import Any

import relquery_requests

import fake_engine

COST = {"step_s": 0.001, "prefill_s": 0.001}
"""A template of 2,000 tokens takes 2 s where it is not cached, and a row beside it nearly nothing."""
ROWS = 40


def long_body(subject: str) -> dict[str, Any]:
    """A relQuery whose rows begin with the same eight blocks."""
    template = f"About {subject}: " + "some context that all rows share. " * 240 + "Name a city of {{country}}."
    return relquery_requests.body(template=template, rows=[{"country": f"c{i}"} for i in range(ROWS)])


async def rows_by_engine(client: Any, engines: list[fake_engine.FakeEngine]) -> list[collections.Counter[str]]:
    """Runs two relQueries side by side, one row of each at a time; the rows of each at each engine, by its subject."""

    async def run(subject: str) -> None:
        async with client.http.post(client.url + "/v1/relqueries", json=long_body(subject)) as response:
            assert response.status == 200
            found = relquery_requests.of_rows(await relquery_requests.events(response))
            assert len(found) == ROWS

    await asyncio.gather(run("rivers"), run("cities"))
    return [
        collections.Counter(body["messages"][0]["content"].split(":")[0].split()[1] for body in engine.bodies)
        for engine in engines
    ]


async def test_the_rows_of_a_relquery_go_to_the_engine_that_holds_their_shared_prefix(up: Any) -> None:
    async with fake_engine.engine(tokens=1, first_s=0.005) as one, fake_engine.engine(tokens=1, first_s=0.005) as two:
        engines = [{"url": engine.url, "cost": COST} for engine in (one, two)]
        async with up(*engines, relqueries={"window": 1, "floor": 1}) as client:
            found = await rows_by_engine(client, [one, two])
        for subject in ("rivers", "cities"):
            most, rest = sorted((counts[subject] for counts in found), reverse=True)
            assert most + rest == ROWS
            assert rest <= 2, "the first row of each may meet an engine that is busy"


async def test_without_the_index_of_prefixes_the_rows_go_anywhere(up: Any) -> None:
    async with fake_engine.engine(tokens=1, first_s=0.005) as one, fake_engine.engine(tokens=1, first_s=0.005) as two:
        engines = [{"url": engine.url, "cost": COST} for engine in (one, two)]
        async with up(*engines, relqueries={"window": 1, "floor": 1}, dispatch={"prefixEntries": 0}) as client:
            found = await rows_by_engine(client, [one, two])
        assert min(counts[subject] for counts in found for subject in ("rivers", "cities")) > 2
