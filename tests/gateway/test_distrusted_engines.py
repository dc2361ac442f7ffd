"""An engine that fails the calls of one tenant and serves all others: that tenant's calls go elsewhere."""

import asyncio
import collections
from typing import Any

import orjson
import pytest
import relquery_requests
from troubled_engines import preferring

import fake_engine

VICTIM, OTHER = ({"x-tidegate-tenant": name} for name in ("victim", "other"))
PATIENT = {"timeout": "10s", "baseEjection": "60s", "maxEjection": "60s"}
"""Health checks that no slow machine fails, and one pause that lasts until the end of the test."""
SAID = "words of the victim"


async def victims(client: Any, calls: int) -> collections.Counter[int]:
    """The statuses of so many calls of the victim at the same time."""
    asked = [client.ask(headers=VICTIM, messages=[{"role": "user", "content": SAID}]) for _ in range(calls)]
    return collections.Counter([status for status, _, _ in await asyncio.gather(*asked)])


@pytest.mark.parametrize("status", [500, 502, 401, 204])
async def test_every_call_of_the_tenant_is_served(up: Any, status: int) -> None:
    """The engine fails them at once, so it has room for more of them."""
    async with (
        fake_engine.engine(fails=(SAID, status)) as bad,
        fake_engine.engine() as good,
        fake_engine.engine() as third,
        up(*preferring(bad, good), third, health=PATIENT) as client,
    ):
        served = collections.Counter[int]()
        for _ in range(10):
            assert (await client.ask(headers=OTHER))[0] == 200
            served += await victims(client, 40)
        assert served == {200: 400}
        assert client.all_accepting(), "it serves the other tenant"
        failed = sum(SAID in str(body) for body in bad.bodies)
        assert 3 <= failed <= 43, "what was sent before the third failure was known, and none after it"
        before = bad.served
        for _ in range(5):
            assert (await client.ask(headers=OTHER))[0] == 200
        assert bad.served > before


async def test_every_row_of_the_tenant_is_served(up: Any) -> None:
    async with (
        fake_engine.engine(fails=("city", 500)) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), health=PATIENT) as client,
    ):
        for _ in range(3):
            assert (await client.ask(headers=OTHER))[0] == 200

        async def counts() -> Any:
            rows = relquery_requests.body(60)
            async with client.http.post(f"{client.url}/v1/relqueries", json=rows, headers=VICTIM) as response:
                return (await relquery_requests.events(response))[-2][1]["request_counts"]

        for each in await asyncio.gather(*[counts() for _ in range(6)]):
            assert each == {"total": 60, "completed": 60, "failed": 0}
        assert client.all_accepting()
        assert 3 <= sum("city" in str(body) for body in bad.bodies) <= 60


async def test_streams_that_break_off_are_failures_too(up: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        fake_engine.engine() as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), health=PATIENT) as client,
    ):
        broken = 0
        for _ in range(12):
            assert (await client.ask(headers=OTHER))[0] == 200
            bad.break_after = 1
            body = {"model": "fake", "prompt": "x", "stream": True}
            async with client.http.post(f"{client.url}/v1/completions", json=body, headers=VICTIM) as response:
                broken += b'"error"' in await response.read()
            bad.break_after = None
        assert broken == 3
        assert [line for line in caplog.messages if "avoid" in line] == [
            f"calls of tenant victim avoid engine {bad.url.removeprefix('http://')} for 60 s: it fails them"
        ]


async def test_an_answer_that_its_tokens_cannot_explain_is_a_failure(up: Any) -> None:
    said = {"role": "assistant", "content": "x" * 400_000}
    answer = {"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": said}]}
    async with (
        fake_engine.engine(garbage=orjson.dumps(answer)) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good), health=PATIENT) as client,
    ):
        status, found, _ = await client.ask(max_tokens=4)
        assert (status, len(bad.bodies), found["choices"][0]["message"]["content"]) == (200, 1, "w0 w1 w2 w3 ")
        for more in ({}, {"max_tokens": 4, "logprobs": True}, {"max_tokens": 4000}):
            status, found, _ = await client.ask(**more)
            assert (status, found["choices"]) == (200, answer["choices"]), f"{more} may have such an answer"
