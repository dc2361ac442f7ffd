"""A picker that is killed, that leaves, or that is late: what becomes of the calls at a real Envoy."""

import asyncio
import contextlib
import itertools
import json
import pathlib
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import envoy_process
import pytest

import fake_engine
from tidegate_cli import processes

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
OPEN_OR_CLOSED = pytest.mark.parametrize(
    "goes_on", [pytest.param(True, id="fail open"), pytest.param(False, id="fail close")]
)


@contextlib.asynccontextmanager
async def gateway_process(
    folder: pathlib.Path, engines: list[fake_engine.FakeEngine], **settings: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway that can be killed, and the address of its picker's port."""
    port, picker_port = processes.free_port(), processes.free_port()
    listen = {"port": port, "grpcPort": None, "adminPort": None, "extProcPort": picker_port}
    document = {"listen": listen, "engines": [{"url": engine.url} for engine in engines], **settings}
    file = folder / "gateway.json"
    file.write_text(json.dumps(document))
    words = ["-m", "tidegate_cli.main", "gateway", "--config", str(file), "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words)
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"http://127.0.0.1:{port}/v1/models") as answer:
                        if (await answer.json())["data"]:
                            break
                await asyncio.sleep(0.05)
        yield process, f"127.0.0.1:{picker_port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ask(http: aiohttp.ClientSession, url: str, **fields: Any) -> int:
    async with http.post(f"{url}/v1/chat/completions", json={**CHAT, **fields}) as answer:
        await answer.read()
        return answer.status


@OPEN_OR_CLOSED
async def test_a_killed_picker(tmp_path: pathlib.Path, until: Any, goes_on: bool) -> None:
    async with (
        fake_engine.engine(tokens=60, token_s=0.02) as engine,
        gateway_process(tmp_path, [engine], dispatch={"cap": 1}) as (process, picker),
        aiohttp.ClientSession() as http,
    ):
        config = envoy_process.configuration(picker, [engine.url], failure_mode_allow=goes_on)
        async with envoy_process.envoy(tmp_path, config) as url:
            stream = {**CHAT, "stream": True}
            async with http.post(f"{url}/v1/chat/completions", json=stream) as answer:
                assert await answer.content.readline()
                waiting = asyncio.create_task(ask(http, url))
                await asyncio.sleep(0.2)  # it may also come after the end of the picker, with the same outcome
                assert not waiting.done()
                process.kill()
                await process.wait()
                if goes_on:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
                else:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
            assert await waiting == (200 if goes_on else 500)
            assert await ask(http, url) == (200 if goes_on else 500)


@OPEN_OR_CLOSED
async def test_a_picker_that_does_not_answer(tmp_path: pathlib.Path, goes_on: bool) -> None:
    async with (
        fake_engine.engine() as engine,
        gateway_process(tmp_path, [engine]) as (process, picker),
        aiohttp.ClientSession() as http,
    ):
        config = envoy_process.configuration(picker, [engine.url], failure_mode_allow=goes_on, message_timeout="0.3s")
        async with envoy_process.envoy(tmp_path, config) as url:
            assert await ask(http, url) == 200
            process.send_signal(signal.SIGSTOP)
            assert await ask(http, url) == (200 if goes_on else 504)
            process.send_signal(signal.SIGCONT)
            assert await ask(http, url) == 200


async def test_a_proxy_goes_down_the_list_and_the_failed_engine_gets_no_more_calls(
    up: Any, until: Any, tmp_path: pathlib.Path
) -> None:
    async with (
        fake_engine.engine(status=503) as engine,
        fake_engine.engine() as second,
        fake_engine.engine() as third,
        up(
            engine,
            second,
            third,
            listen={"extProcPort": 0},
            picker={"fallbacks": 2},
            dispatch={"rule": "round-robin"},
            health={"consecutiveFailures": 2, "baseEjection": "600s", "maxEjection": "600s"},
        ) as client,
    ):
        urls = [each.url for each in (engine, second, third)]
        config = envoy_process.configuration(client.ext_proc, urls, failure_mode_allow=False)
        retry = {"retry_on": "5xx", "num_retries": 2}
        envoy_process.set_routes(
            config, {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s", "retry_policy": retry}}
        )
        async with envoy_process.envoy(tmp_path, config) as url:
            for _ in range(12):
                async with client.http.post(f"{url}/v1/chat/completions", json=CHAT) as answer:
                    assert answer.status == 200
                    served = answer.headers["x-gateway-destination-endpoint-served"]
                    assert served == answer.headers["x-tidegate-engine"]
            await until(lambda: client.gateway.placements.in_progress == 0)
            assert len(engine.bodies) == 2
            assert sorted(client.accepting()) == sorted(url.removeprefix("http://") for url in urls[1:])
            assert len(second.headers[0]["x-gateway-destination-endpoint"].split(",")) == 3


async def test_fail_open_does_not_help_bodies_that_are_streamed(tmp_path: pathlib.Path) -> None:
    mode = {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
    async with (
        fake_engine.engine(first_s=3600) as engine,
        gateway_process(tmp_path, [engine], dispatch={"cap": 1}) as (process, picker),
        aiohttp.ClientSession() as http,
    ):
        config = envoy_process.configuration(picker, [engine.url], failure_mode_allow=True, processing_mode=mode)
        async with envoy_process.envoy(tmp_path, config) as url:
            first = asyncio.create_task(ask(http, url))
            async with asyncio.timeout(10):
                while not engine.running:
                    await asyncio.sleep(0.01)
            waiting = asyncio.create_task(ask(http, url))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            engine.first_s = 0.0
            process.kill()
            assert await waiting == 500
            assert await ask(http, url) == 500, "docs/envoy.md says so; if this changes, it must say something else"
            first.cancel()


@OPEN_OR_CLOSED
async def test_a_picker_that_comes_back_picks_again(tmp_path: pathlib.Path, until: Any, goes_on: bool) -> None:
    async with fake_engine.engine() as engine, aiohttp.ClientSession() as http:
        picker = f"127.0.0.1:{processes.free_port()}"
        config = envoy_process.configuration(picker, [engine.url], failure_mode_allow=goes_on)
        async with envoy_process.envoy(tmp_path, config) as url:
            assert await ask(http, url) == (200 if goes_on else 500)
            assert all("vllm_xargs" not in body for body in engine.bodies)
            async with gateway_process(tmp_path, [engine]) as (_, other):
                forward = await asyncio.start_server(
                    lambda reader, writer: _forward(reader, writer, other), "127.0.0.1", int(picker.split(":")[1])
                )
                async with forward:

                    async def picked() -> bool:
                        return await ask(http, url) == 200 and "vllm_xargs" in engine.bodies[-1]

                    await until(picked)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: str) -> None:
    """Joins a connection with one to another address."""
    host, port = to.split(":")
    there, back = await asyncio.open_connection(host, int(port))

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    await asyncio.gather(copy(reader, back), copy(there, writer))


async def test_a_picker_that_leaves_sheds_no_call_that_another_one_can_take(tmp_path: pathlib.Path, until: Any) -> None:
    """As behind a Service that learns late that a picker leaves: the next connection reaches it too, then all the other."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(fake_engine.engine()) for _ in range(2)]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        started = []
        for name, engine in zip("ab", engines, strict=True):
            (folder := tmp_path / name).mkdir()
            settings = {"timeouts": {"announce": "60s"}}
            started.append(await stack.enter_async_context(gateway_process(folder, [engine], **settings)))
        (leaving, picker), (_, other) = started
        ways = itertools.chain((picker, picker), itertools.repeat(other))
        forward = await asyncio.start_server(
            lambda reader, writer: _forward(reader, writer, next(ways)), "127.0.0.1", processes.free_port()
        )
        await stack.enter_async_context(forward)
        config = envoy_process.configuration(
            f"127.0.0.1:{forward.sockets[0].getsockname()[1]}",
            [engine.url for engine in engines],
            failure_mode_allow=False,
        )
        url = await stack.enter_async_context(envoy_process.envoy(tmp_path, config))
        assert await ask(http, url) == 200
        assert (engines[0].served, engines[1].served) == (1, 0)
        leaving.send_signal(signal.SIGTERM)

        async def moved() -> bool:
            assert await ask(http, url) == 200
            return engines[1].served > 0

        await until(moved)
        assert leaving.returncode is None


async def test_a_picker_that_leaves_cuts_no_stream(up: Any, tmp_path: pathlib.Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(fake_engine.engine(tokens=60, token_s=0.02))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        leaving = contextlib.AsyncExitStack()
        listen, limits = {"extProcPort": 0}, {"drain": "100ms"}
        client = await leaving.enter_async_context(up(engine, listen=listen, timeouts=limits, dispatch={"cap": 1}))
        config = envoy_process.configuration(client.ext_proc, [engine.url], failure_mode_allow=False)
        url = await stack.enter_async_context(envoy_process.envoy(tmp_path, config))
        answer = await stack.enter_async_context(http.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": True}))
        assert await answer.content.readline()
        waiting = asyncio.create_task(ask(http, url))
        async with asyncio.timeout(10):
            while client.gateway.core.dispatcher.waiting == 0:
                await asyncio.sleep(0.01)
        await leaving.aclose()
        assert await waiting == 503
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_a_cancelled_workflow_ends_its_call(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine(tokens=10_000, token_s=0.01) as engine,
        envoy_process.picking(up, tmp_path, engine) as (client, url),
    ):
        async with client.http.post(f"{url}/v1/workflows", json={"id": "w", "deadline_ms": 600_000}) as created:
            assert created.status == 201
        named = {"x-tidegate-workflow": "w", "x-tidegate-stage": "a"}
        call = {**CHAT, "stream": True}
        async with client.http.post(f"{url}/v1/chat/completions", json=call, headers=named) as answer:
            assert await answer.content.readline()
            async with client.http.delete(f"{url}/v1/workflows/w") as cancelled:
                assert cancelled.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await until(lambda: engine.running == 0)
        await until(lambda: client.gateway.placements.in_progress == 0)


async def test_an_engine_that_never_answers_is_given_up(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    timeouts = {"firstToken": "100ms", "answer": "100ms"}
    async with (
        fake_engine.engine(hang=True) as engine,
        envoy_process.picking(up, tmp_path, engine, timeouts=timeouts) as (client, url),
    ):
        assert await ask(client.http, url) == 500
        await until(lambda: engine.running == 0)
        assert not client.own_backlog()
