"""Calls that fail leave no cycles of objects. A full collection is rare, and takes long where many cycles wait for it."""

import asyncio
from typing import Any

import pytest

import fake_engine
from tidegate_gateway import http_client, reading_turns
from tidegate_gateway.lifecycle import watchdog
from tidegate_gateway.openai import error_table


async def asked(client: Any, times: int, *, stream: bool) -> bytes:
    """The last of so many answers."""
    answer = b""
    body = {"model": "fake", "prompt": "x", "stream": stream}
    for _ in range(times):
        async with client.http.post(client.url + "/v1/completions", json=body) as response:
            answer = await response.read()
    return answer


@pytest.mark.parametrize(
    ("engine", "timeouts", "stream", "code"),
    [
        ({"status": 500}, {}, False, b"engine_failed"),
        ({"garbage": b"?"}, {}, False, b"engine_failed"),
        ({"hang": True}, {"firstToken": "200ms"}, True, b"engine_timeout"),
        ({"tokens": 50, "hang_after": 3}, {"nextToken": "200ms"}, True, b"engine_timeout"),
        ({"tokens": 50, "break_after": 3}, {}, True, b"engine_failed"),
    ],
    ids=["status 500", "no JSON", "no first token", "silent in mid-stream", "broken off in mid-stream"],
)
async def test_a_call_that_its_engine_fails_leaves_no_cycle_of_objects(
    up: Any, found_by_collector: Any, engine: Any, timeouts: Any, stream: bool, code: bytes
) -> None:
    async with fake_engine.engine(**engine) as failing, up(failing, timeouts=timeouts) as client:
        found_by_collector()
        assert code in await asked(client, 2, stream=stream)
        await asyncio.sleep(0.1)
        found = found_by_collector()
        assert not found


async def test_a_call_that_is_interrupted_in_mid_stream_leaves_no_cycle_of_objects(found_by_collector: Any) -> None:
    """As those of a cancelled workflow are."""

    async def interrupted() -> str:
        dog = watchdog.Watchdog()
        end = error_table.GatewayError("workflow_ended", "it is cancelled")
        asyncio.get_running_loop().call_soon(dog.interrupt, end)
        del end
        try:
            await dog.within(60.0, asyncio.sleep(60.0), "sent no token")
        except error_table.GatewayError as error:
            return error.code
        finally:
            dog.close()
        return ""

    found_by_collector()
    assert await asyncio.create_task(interrupted()) == "workflow_ended"
    found = found_by_collector()
    assert not found


async def test_a_connection_whose_server_breaks_the_protocol_leaves_no_cycle(found_by_collector: Any) -> None:
    """The parser raises `ConnectionLost` for this one; the connection keeps why it was lost."""
    found_by_collector()
    arrived = memoryview(bytearray(http_client.READ_BYTES))
    connection = http_client.Connection(print, reading_turns.ReadingTurns(), arrived, http_client.READ_BYTES)
    connection.buffer_updated(1)  # nobody has sent a request
    connection.connection_lost(None)
    del connection
    found = found_by_collector()
    assert not found
