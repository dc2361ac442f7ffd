"""A gateway that leaves answers everybody who has reached it; nobody sees a reset."""

import asyncio
import logging
from typing import Any

import aiohttp
import orjson
import pytest

import fake_engine

CALL = orjson.dumps({"model": "fake", "prompt": "x", "max_tokens": 2})
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(CALL)


async def test_a_connection_that_brings_its_request_late_is_still_answered(up: Any, until: Any) -> None:
    async with asyncio.TaskGroup() as group, fake_engine.engine() as engine:
        async with up(engine) as client:
            host, port = client.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))

            async def late() -> bytes:
                await until(lambda: client.gateway.draining)
                writer.write(HEAD + CALL)
                answer = await reader.read()
                writer.close()
                return answer

            answered = group.create_task(late())
        answer = await answered
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Connection: close" in answer
    assert b'"code":"draining"' in answer


async def test_calls_that_outlast_the_drain_get_an_error(up: Any, until: Any) -> None:
    async with (
        aiohttp.ClientSession() as http,  # the client's own session closes before its gateway
        asyncio.TaskGroup() as group,
        fake_engine.engine(hang_after=1) as stuck,
    ):
        async with up(stuck, timeouts={"drain": "100ms"}) as client:

            async def ask(stream: bool) -> tuple[int, bytes]:
                body = {"model": "fake", "prompt": "x", "stream": stream}
                async with http.post(client.url + "/v1/completions", json=body) as response:
                    return response.status, await response.read()

            streamed = group.create_task(ask(stream=True))
            await until(lambda: stuck.running == 1)
            stuck.hang = True
            whole = group.create_task(ask(stream=False))
            await until(lambda: stuck.running == 2)
            await until(lambda: client.gateway.placements.begun)
        (status, text), (refused, error) = await streamed, await whole
    assert (status, refused) == (200, 503)
    assert b'"code":"draining"' in text
    assert text.endswith(b"data: [DONE]\n\n")
    assert orjson.loads(error)["error"]["code"] == "draining"


async def test_the_log_line_of_a_call_names_only_known_fields(up: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tidegate.gateway"):
        async with fake_engine.engine() as engine, up(engine) as client:
            await client.ask("/v1/completions", prompt="x")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("call ")]
    assert len(lines) == 1
    assert "engine=" in lines[0]
    assert "None" not in lines[0]
    assert "tenant=" not in lines[0]
