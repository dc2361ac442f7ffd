"""A client that goes away stops its call wherever it is; nothing stays behind."""

import asyncio
import socket
from typing import Any

import aiohttp
import grpc
import pytest

import fake_engine
from tidegate_proto.envoy import ext_proc_pb2, ext_proc_pb2_grpc


async def started(client: Any, *, stream: bool) -> asyncio.StreamWriter:
    """A request over a plain socket, to be cut."""
    host, port = client.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model":"fake","prompt":"x","stream":%s}' % (b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await writer.drain()
    return writer


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_before_the_first_token_stops_the_engine(up: Any, until: Any, stream: bool) -> None:
    async with fake_engine.engine(first_s=30) as engine, up(engine) as client:
        writer = await started(client, stream=stream)
        await until(lambda: engine.running == 1)
        writer.transport.abort()
        await until(lambda: engine.running == 0, within_s=5)
        await until(lambda: client.gateway.placements.in_progress == 0)
        assert not client.own_backlog()


async def test_hanging_up_in_mid_stream_stops_the_engine(up: Any, until: Any) -> None:
    async with fake_engine.engine(tokens=10_000, token_s=0.01) as engine, up(engine) as client:
        writers = [await started(client, stream=True) for _ in range(20)]
        await until(lambda: engine.running == 20)
        for writer in writers:
            writer.close()
        await until(lambda: engine.running == 0, within_s=5)
        await until(lambda: client.gateway.core.dispatcher.inflight == 0)


async def test_hanging_up_while_waiting_leaves_the_queue(up: Any, until: Any) -> None:
    async with fake_engine.engine(first_s=30) as engine, up(engine, dispatch={"cap": 1}) as client:
        first = await started(client, stream=False)
        await until(lambda: engine.running == 1)
        second = await started(client, stream=False)
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        second.transport.abort()
        await until(lambda: client.gateway.core.dispatcher.waiting == 0)
        assert len(engine.bodies) == 1
        first.transport.abort()
        await until(lambda: engine.running == 0)


async def test_a_client_that_does_not_read_is_given_up(up: Any, until: Any) -> None:
    async with fake_engine.engine(tokens=200_000) as engine, up(engine, limits={"write": "300ms"}) as client:
        writer = await started(client, stream=True)
        writer.transport.pause_reading()
        await until(lambda: engine.running == 1)
        await until(lambda: engine.running == 0, within_s=20)
        await until(lambda: client.gateway.placements.in_progress == 0)
        writer.close()


async def test_hanging_up_leaves_its_workflow_stage_open(up: Any, until: Any) -> None:
    async with fake_engine.engine(first_s=30) as engine, up(engine) as client:
        await client.send("POST", "/v1/workflows", json={"id": "w", "deadline_ms": 60_000, "stages": [{"name": "a"}]})
        ask = asyncio.create_task(client.ask(headers={"x-tidegate-workflow": "w", "x-tidegate-stage": "a"}))
        await until(lambda: engine.running == 1)
        ask.cancel()

        async def calls() -> bool:
            _, flow, _ = await client.send("GET", "/v1/workflows/w")
            (stage,) = flow["stages"]
            return (stage["calls_running"], stage["calls_done"], flow["state"]) == (0, 0, "running")

        await until(calls)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_any_kind_of_answer_is_cut(up: Any, until: Any, stream: bool) -> None:
    text = b"x" * 15_000_000
    event = b'data: {"choices":[{"text":"' + text[:1_000_000] + b'"}]}\n\n'
    garbage = event * 15 + b"data: [DONE]\n\n" if stream else b'{"choices":[{"text":"' + text + b'"}]}'
    limits, listen = {"write": "300ms", "connections": 1}, {"metricsPort": 0}
    async with fake_engine.engine(garbage=garbage) as engine, up(engine, limits=limits, listen=listen) as client:
        host, port = client.url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setblocking(False)
            await asyncio.get_running_loop().sock_connect(slow, (host, int(port)))
            body = b'{"model":"fake","prompt":"x","stream":%s}' % (b"true" if stream else b"false")
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            await asyncio.get_running_loop().sock_sendall(slow, head + body)
            await until(lambda: engine.bodies)

            async def room() -> bool:
                try:
                    return (await client.send("GET", "/health"))[0] == 200
                except aiohttp.ClientError:
                    return False

            assert not await room(), "the slow one has the only connection"
            for path in ("/health", "/ready", "/metrics"):
                async with client.http.get(client.probe_url + path) as probe:
                    assert probe.status == 200, "probes have a port of their own"
            await until(room, within_s=20)
            await until(lambda: client.gateway.placements.in_progress == 0)


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(up: Any) -> None:
    answer = b'{"choices":[{"text":"' + b"x" * 15_000_000 + b'"}]}'
    async with fake_engine.engine(garbage=answer) as engine, up(engine, limits={"write": "300ms"}) as client:
        body = {"model": "fake", "prompt": "x"}
        async with client.http.post(client.url + "/v1/completions", json=body) as response:
            read = 0
            async for chunk in response.content.iter_chunked(1_000_000):
                read += len(chunk)
                await asyncio.sleep(0.05)
        assert read == len(answer)


@pytest.mark.parametrize("when", ["before the first token", "in mid-stream", "while it waits"])
async def test_a_call_that_is_hung_up_leaves_no_cycle_of_objects(
    up: Any, until: Any, found_by_collector: Any, when: str
) -> None:
    """A full collection is rare: what waits for it holds whole requests for minutes."""
    first_s = 0.0 if when == "in mid-stream" else 30.0
    cap = {"cap": 1} if when == "while it waits" else {}
    async with (
        fake_engine.engine(tokens=10_000, token_s=0.01, first_s=first_s) as engine,
        up(engine, dispatch=cap) as client,
    ):
        found_by_collector()
        writers = [await started(client, stream=True) for _ in range(10)]
        dispatcher = client.gateway.core.dispatcher
        await until(lambda: engine.running + dispatcher.waiting == 10)
        await asyncio.sleep(0.3 if when == "in mid-stream" else 0)
        for writer in writers:
            writer.transport.abort()
        await until(lambda: engine.running == 0 and client.gateway.placements.in_progress == 0)
        await asyncio.sleep(0.1)
        found = found_by_collector()
        assert not found


async def test_a_call_that_is_shed_leaves_no_cycle_of_objects(up: Any, found_by_collector: Any) -> None:
    async with fake_engine.engine(first_s=30.0) as engine, up(engine, dispatch={"cap": 1}) as client:
        held = await started(client, stream=True)
        found_by_collector()
        for _ in range(5):
            headers = {"x-tidegate-deadline-ms": "50"}
            body = {"model": "fake", "prompt": "x"}
            async with client.http.post(client.url + "/v1/completions", json=body, headers=headers) as answer:
                status = answer.status
            assert status in (429, 503, 504)
        await asyncio.sleep(0.1)
        found = found_by_collector()
        assert not found
        held.transport.abort()


async def test_an_exchange_that_a_proxy_gives_up_leaves_no_cycle_of_objects(
    up: Any, until: Any, found_by_collector: Any
) -> None:
    sent = ext_proc_pb2.ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/completions"), ("content-type", "application/json")):
        sent.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body = ext_proc_pb2.ProcessingRequest()
    body.request_body.body, body.request_body.end_of_stream = b'{"model": "fake", "prompt": "x"}', True
    async with fake_engine.engine() as engine, up(engine, listen={"extProcPort": 0}) as client:
        async with grpc.aio.insecure_channel(client.ext_proc) as channel:
            found_by_collector()
            stream = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
            for each in (sent, body):
                await stream.write(each)
                await stream.read()
            assert client.gateway.placements.in_progress == 1
            stream.cancel()
            await until(lambda: client.gateway.placements.in_progress == 0)
        await asyncio.sleep(0.1)
        found = found_by_collector()
        assert not found
