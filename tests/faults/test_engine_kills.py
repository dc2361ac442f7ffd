"""What clients see of an engine that is killed while it runs their calls (SIGKILL, no goodbye)."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
import steady_calls

pytestmark = pytest.mark.faults

ENGINES, CLIENTS, TOKENS = 6, 48, 150
STEADY_S = 12.0
MOST_RETRIES = 10
"""A fifth of the calls under way."""


@dataclass(slots=True)
class Call:
    """What a client knows of its stream. Times are of the monotonic clock."""

    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    tokens: int = 0
    outcome: str = "no answer"
    """`done`, `error event`, the status of a rejection, or what broke."""


async def stream(http: Any, url: str) -> Call:
    call = Call(time.monotonic())
    body = {"model": "sim", "prompt": "word " * 100, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    try:
        async with http.post(url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                call.outcome = str(answer.status)
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: "):
                    continue
                if data == b"[DONE]":
                    call.outcome = "done" if call.outcome == "no answer" else call.outcome
                elif "error" in (event := orjson.loads(data)):
                    call.outcome = "error event"
                elif event["choices"] and event["choices"][0]["text"]:
                    call.first_s = call.first_s or time.monotonic()
                    call.tokens += 1
    except OSError as error:
        call.outcome = type(error).__name__
    call.ended_s = time.monotonic()
    return call


def p99_first_s(calls: list[Call]) -> float:
    return steady_calls.percentile((call.first_s - call.sent_s for call in calls if call.first_s is not None), 0.99)


async def test_a_killed_engine_ends_its_streams_visibly_and_delays_nobody(rig: Any, until: Any, figure: Any) -> None:
    engines = [await rig.engine(speed=2) for _ in range(ENGINES)]
    gateway = await rig.gateway(engines, None)
    calls: list[Call] = []
    going_on = True

    async def client() -> None:
        while going_on:
            calls.append(await stream(rig.http, gateway.url))

    async def up() -> float:
        return rig.value(await rig.metrics(gateway), "tidegate_engine_up")

    async def is_one_out() -> bool:
        return await up() == ENGINES - 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
        await asyncio.sleep(STEADY_S)
        retries = rig.value(await rig.metrics(gateway), "tidegate_retries_total")
        assert await up() == ENGINES
        killed_s = time.monotonic()
        engines[0].kill()
        await until(is_one_out)
        out_s = time.monotonic() - killed_s
        await asyncio.sleep(STEADY_S)
        going_on = False
    retries = rig.value(await rig.metrics(gateway), "tidegate_retries_total") - retries
    broken = [call for call in calls if call.outcome != "done"]
    told_s = max((call.ended_s - killed_s for call in broken), default=0.0)
    before = [call for call in calls if call.ended_s < killed_s]
    after = [call for call in calls if call.sent_s > killed_s]
    ratio = p99_first_s(after) / p99_first_s(before)
    early = [call for call in broken if call.first_s is None]
    figure("engine killed: seconds until it gets no call", f"{out_s:.2f}", goal="at most 1", met=out_s <= 1)
    figure("engine killed: streams that ended with an error event", str(len(broken) - len(early)), goal="-", met=True)
    figure("engine killed: the last of them after, s", f"{told_s:.2f}", goal="at most 2", met=told_s <= 2)
    figure("engine killed: calls without a token that failed", str(len(early)), goal="0", met=not early)
    figure("engine killed: attempts at another engine", f"{retries:.0f}", goal=f"at most {MOST_RETRIES}",
           met=retries <= MOST_RETRIES)  # fmt: skip
    figure("engine killed: TTFT p99 after by that before", f"{ratio:.2f}", goal="below 1.5", met=ratio < 1.5)
    assert broken, "nothing ran at the engine"
    assert {call.outcome for call in broken} == {"error event"}
    assert all(call.tokens == TOKENS for call in calls if call.outcome == "done"), "tokens were lost or came twice"
    assert all(0 < call.tokens < TOKENS for call in broken)
