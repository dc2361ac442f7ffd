"""Streams that clients cancel at random points leave no call, task, socket or backlog behind.

`make test` cancels a few hundred on simulated engines, `make faults` ten thousand on each wire and ten thousand on vLLM.
"""

import asyncio
import importlib.util
import os
import pathlib
import random
import socket
import struct
import time
from typing import Any

import grpc
import orjson
import pytest

from tidegate_engine import live_engine
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

IS_FULL = "TIDEGATE_FAULTS" in os.environ
STREAMS = 10_000 if IS_FULL else 300
AT_ONCE = 64
"""Streams at one time: more than the engine runs, so some are cancelled while they wait."""
LONGEST_S = 0.6
"""About the time of a whole stream on an engine with this load."""
MORE_TASKS, MORE_FILES = 8, 24
"""What may differ at rest: idle connections to the engine and to the store."""
KIB = 1024
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a time of zero: closing the socket sends RST."""

pytestmark = pytest.mark.timeout(1800 if IS_FULL else 300)


async def over_http(rng: random.Random, port: int, model: str) -> None:
    """One stream, which ends after a random time by FIN, half-close or RST; some clients read what came until then."""
    body = orjson.dumps({"model": model, "prompt": "word " * rng.randrange(1, 300), "max_tokens": 20, "stream": True})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body)[: rng.choice([None, None, None, -1])])  # some never send their last byte
        await asyncio.sleep(rng.uniform(0, LONGEST_S))
        way = rng.choice(["close", "half-close", "reset", "read and close"])
        if way == "half-close" and writer.can_write_eof():
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 30)
        elif way == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif way == "read and close":
            await asyncio.wait_for(reader.read(rng.randrange(1, 4000)), 30)
    except (ConnectionError, TimeoutError):
        pass  # the gateway has cut a request whose last byte never came
    finally:
        writer.close()


async def over_grpc(rng: random.Random, stub: inference_pb2_grpc.InferenceStub) -> None:
    """One stream, which is cancelled after a random time, sometimes twice."""
    words = "word " * rng.randrange(1, 300)
    stream = stub.Generate(inference_pb2.GenerateRequest(model="sim", prompt=words, max_tokens=20))
    await asyncio.sleep(rng.uniform(0, LONGEST_S))
    stream.cancel()
    if rng.random() < 0.3:
        stream.cancel()


@pytest.mark.parametrize("wire", ["HTTP", "gRPC"])
async def test_cancelled_streams_leave_nothing_behind(
    rig: Any, until: Any, free_port: Any, figure: Any, wire: str
) -> None:
    await check_that_nothing_is_left(rig, until, free_port, figure, wire, await rig.engine(speed=2), model="sim")


@pytest.mark.faults
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM CPU build")
async def test_cancelled_streams_leave_nothing_behind_in_vllm(
    rig: Any, until: Any, free_port: Any, figure: Any, tmp_path: pathlib.Path
) -> None:
    with live_engine.served(tmp_path / "engine.log", "--max-num-seqs", "8") as engine:
        process = rig.adopted(engine.http, engine.process, engine.log)
        await check_that_nothing_is_left(rig, until, free_port, figure, "HTTP", process, model=live_engine.MODEL)


async def check_that_nothing_is_left(
    rig: Any, until: Any, free_port: Any, figure: Any, wire: str, engine: Any, *, model: str
) -> None:
    rng = random.Random(12)
    store = await rig.valkey(port=free_port(), folder=rig.folder / "data")
    grpc_port = free_port()
    gateway = await rig.gateway([engine], store.url, grpc_port=grpc_port, limits={"body": "1s"})
    port = int(gateway.url.rpartition(":")[2])

    async def cancel_many(streams: int) -> None:
        left = iter(range(streams))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel, asyncio.TaskGroup() as clients:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def client() -> None:
                for _ in left:
                    await (over_http(rng, port, model) if wire == "HTTP" else over_grpc(rng, stub))

            for _ in range(AT_ONCE):
                clients.create_task(client())

    async def is_at_rest() -> bool:
        """No call runs or waits, and no predicted work is left in the store, whose other gateways would believe it."""
        page = await rig.metrics(gateway)
        of_engine = await rig.metrics(engine)
        calls = [rig.value(of_engine, f"vllm:num_requests_{state}") for state in ("running", "waiting")]
        backlog_s = rig.value(page, "tidegate_engine_backlog_seconds")
        return not any([*calls, backlog_s, rig.value(page, "tidegate_queue_depth")])

    await cancel_many(AT_ONCE)
    await until(is_at_rest, 60)
    await asyncio.sleep(1)
    tasks, files, memory = await rig.tasks(gateway), gateway.open_files, gateway.memory
    await cancel_many(STREAMS)
    ended_at_s = time.monotonic()
    await until(is_at_rest, 60)
    rest_s = time.monotonic() - ended_at_s

    async def nothing_more() -> bool:
        return await rig.tasks(gateway) <= tasks + MORE_TASKS and gateway.open_files <= files + MORE_FILES

    await until(nothing_more, 60)
    growth = (gateway.memory - memory) / STREAMS / KIB
    streams = f"{STREAMS} streams of {wire} to {model} cancelled"
    figure(f"{streams}: at rest after, s", f"{rest_s:.1f}", goal="at most 5", met=rest_s <= 5)
    figure(f"{streams}: KiB each that stay", f"{growth:.2f}", goal="below 1", met=growth < 1)
    said = gateway.log.read_text()
    assert "was never retrieved" not in said
    assert "was destroyed" not in said
    assert "Traceback" not in said
    status, _ = await rig.completion(gateway, model)
    assert status == 200
