"""The example of an Envoy holds what the documentation promises, also against a client that takes all places."""

import asyncio
import contextlib
import hashlib
import json
import pathlib
from typing import Any

import aiohttp
import envoy_process

import fake_engine

KEY = "acme-0123456789abcdef"
HELD = 1100
"""More than the requests that Envoy sends to a cluster by default."""


async def posts(url: str, count: int, *headers: str) -> list[asyncio.StreamWriter]:
    """Requests whose bodies do not come."""
    host, port = url.removeprefix("http://").split(":")
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        "Content-Length: 50",
        *headers,
    ]
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write("\r\n".join([*lines, "", "{"]).encode())
        writers.append(writer)
    return writers


async def status(http: aiohttp.ClientSession, url: str, path: str, **headers: str) -> int:
    call = {"model": "fake", "prompt": "x"}
    async with http.post(url + path, json=call, headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_a_client_that_takes_very_many_places_lets_nothing_pass_and_keeps_nobody_out(
    up: Any, tmp_path: pathlib.Path
) -> None:
    keys, key = tmp_path / "keys.json", f"Bearer {KEY}"
    keys.write_text(json.dumps({"keys": [{"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "acme"}]}))
    settings: dict[str, Any] = {
        "auth": {"keysFile": str(keys)},
        "limits": {"body": "120s"},
        "listen": {"extProcPort": 0},
    }
    async with fake_engine.engine() as engine, up(engine, **settings) as client:
        config = envoy_process.configuration(client.ext_proc, [engine.url])  # with the example's own failure mode
        async with envoy_process.envoy(tmp_path, config) as url, aiohttp.ClientSession() as http:
            held = await posts(url, HELD, f"Authorization: {key}")
            await asyncio.sleep(1)
            assert await status(http, url, "/v1/completions", authorization=key) == 200
            assert await status(http, url, "/v1/completions") == 401
            for path in ("/metrics", "/tokenize", "/v1/tokenize", "/health"):
                assert await status(http, url, path, authorization=key) == 404, path
            assert engine.served == 1
            for writer in held:
                writer.close()


async def test_a_body_that_does_not_come_is_given_up(up: Any, tmp_path: pathlib.Path) -> None:
    limits = {"limits": {"body": "500ms"}}
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, **limits) as (client, url),
    ):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        assert await status(client.http, url, "/v1/completions") == 200
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
