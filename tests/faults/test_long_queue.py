"""Very many calls wait, or their streams are open: each has its answer in the end, whoever comes beyond the bound is told
so at once, and the memory is what the settings bound.

`make test` has hundreds of calls, `make faults` as many of 100,000 that wait and of 10,000 streams as the machine's open
files allow.
"""

import asyncio
import contextlib
import os
import pathlib
import random
import socket
import statistics
import time
from typing import Any

import affordable_files
import answer_probe
import grpc_peer
import orjson
import pytest
import steady_calls

import fake_engine
from tidegate_gateway.edge import grpc_messages
from tidegate_gateway.edge import http2_frames as h2
from tidegate_gateway.openai import escaped_text
from tidegate_proto.v1 import inference_pb2

IS_FULL = "TIDEGATE_FAULTS" in os.environ
MOST, MOST_STREAMS = (100_000, 10_000) if IS_FULL else (1000, 300)
FILES_A_CALL, FILES_A_STREAM = 3, 2
"""A waiting call: the client's socket is in the test's process; the gateway needs one for the client and up to one for an
engine. A stream: two sockets in the gateway, and two in the test's process, which has the client and the engine."""
BEYOND = 50
RUNNING, TOGETHER = 16, 200
CALLS_OF_ADDRESS = 20_000
"""Connections from one loopback address, which has a port for each."""
KIB = 1024
STREAMS_A_CONNECTION = 1000
FIELDS = 3
"""Of a message. The gateway counts memory for each."""
URGENT, URGENT_S = (100, 10.0) if IS_FULL else (10, 0.5)
"""Urgent calls that come while the others wait, and the time over which they come."""
URGENT_CLASS = "urgent"
ANSWER_S = (0.03, 0.07)
"""What the engine takes for a call meanwhile. Each call has its own time, so 320 end in a second, at different instants."""
CANCEL = 8
"""The code with which HTTP/2 says that a stream is not wanted any more."""
WAITING_KIB = 12
"""Of memory for a call that waits, besides its body, as the documentation of `queue.maxRequests` says."""
TOLERANCE = 1.2
STREAM_KIB = 60
ONE_TENANT = 2 / 3
"""Of `limits.bodiesBytes`, which the bodies of one tenant may take."""

pytestmark = pytest.mark.timeout(1800 if IS_FULL else 300)


async def connect(port: int, number: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.bind((f"127.0.0.{2 + number // CALLS_OF_ADDRESS}", 0))
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
    return one


async def post(one: socket.socket, body: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(one, head % len(body) + body)


async def test_very_many_waiting_calls_are_all_answered_and_stay_within_the_configured_bytes(
    rig: Any, until: Any, figure: Any
) -> None:
    rng, count = random.Random(7), affordable_files.affordable(MOST, FILES_A_CALL)
    prompts = [100_000 if number % 1000 == 999 else rng.randrange(20, 2000) for number in range(count + BEYOND)]
    sent_bytes = sum(len(body_of(prompt)) for prompt in (*prompts, *prompts[:RUNNING]))
    bodies_bytes = round(sent_bytes / ONE_TENANT)
    loop = asyncio.get_running_loop()
    async with fake_engine.engine(tokens=1, first_s=3600) as engine:
        gateway = await rig.gateway(
            [engine], None,
            dispatch={"cap": RUNNING}, queue={"maxRequests": count, "ttl": "1h"},
            limits={"connections": 2 * MOST, "idle": "1h", "bodiesBytes": bodies_bytes},
            timeouts={"firstToken": "2h", "drain": "1s"},
        )  # fmt: skip
        port = int(gateway.url.rpartition(":")[2])

        async def send(number: int) -> socket.socket:
            one = await connect(port, number)
            await post(one, body_of(prompts[number]))
            return one

        async def waiting() -> float:
            return float(rig.value(await rig.metrics(gateway), "tidegate_queue_depth"))

        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(await send(number)) for number in range(RUNNING)]
            await until(lambda: engine.running == RUNNING)
            before = gateway.memory  # a gateway that has just started, and has carried no call, still grows by itself
            sockets = []
            for first in range(0, count, TOGETHER):
                numbers = range(first, min(first + TOGETHER, count))
                sockets += [stack.enter_context(one) for one in await asyncio.gather(*map(send, numbers))]

            async def all_wait() -> bool:
                return await waiting() == count

            await until(all_wait, 600)
            grown, configured = gateway.memory - before, count * WAITING_KIB * KIB + bodies_bytes
            told_s = []
            for number in range(BEYOND):
                began_s = loop.time()
                one = stack.enter_context(await send(count + number))
                answer = await loop.sock_recv(one, 4096)
                told_s.append(loop.time() - began_s)
                assert answer.startswith(b"HTTP/1.1 429"), answer
                assert b"Retry-After" in answer
            assert await waiting() == count
            engine.first_s = 0.0
            for one in running:
                one.close()
            answers = [await loop.sock_recv(one, 64) for one in sockets]
            answered = sum(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        median_ms = 1000 * statistics.median(told_s)
        figure(f"{count} waiting calls: one more is refused after (median), ms", f"{median_ms:.0f}", goal="at most 50",
               met=median_ms <= 50)  # fmt: skip
        figure(f"{count} waiting calls: answered", str(answered), goal="all", met=answered >= count)
        figure(f"{count} waiting calls: memory, share of the configured bytes", f"{grown / configured:.0%}",
               goal="at most 120%", met=grown <= TOLERANCE * configured)  # fmt: skip
        assert answered >= count
        assert grown <= TOLERANCE * configured
        assert await waiting() == 0
        await until(lambda: engine.running == 0)


def body_of(characters: int) -> bytes:
    return orjson.dumps({"model": "fake", "prompt": "x" * characters, "max_tokens": 1})


def counted_bytes(message: bytes) -> int:
    """What counts of a message: its bytes, what its texts take more as JSON, and its fields."""
    return len(message) + escaped_text.added_bytes(message) + FIELDS * grpc_messages.ENTRY_BYTES


async def first_token_of_urgent_s(rig: Any, url: str) -> float:
    body = {"model": "fake", "prompt": "x", "max_tokens": 1, "stream": True}
    sent_at_s = time.monotonic()
    async with rig.http.post(url + "/v1/completions", json=body, headers={"x-tidegate-class": URGENT_CLASS}) as answer:
        assert answer.status == 200
        while not (await answer.content.readline()).startswith(b"data:"):
            pass
        first_s = time.monotonic() - sent_at_s
        await answer.read()
        return first_s


async def test_very_many_calls_wait_over_few_connections(
    rig: Any, until: Any, figure: Any, free_port: Any, tmp_path: pathlib.Path
) -> None:
    """Over gRPC a call takes no open file, so 100,000 of them wait on any machine. Urgent calls overtake them."""
    rng = random.Random(7)
    messages = [message_of(rng.randrange(20, 2000)) for _ in range(MOST + RUNNING)]
    bodies_bytes = round(sum(map(counted_bytes, messages)) / ONE_TENANT)
    async with (
        fake_engine.engine(tokens=1, first_s=3600) as engine,
        asyncio.TaskGroup() as following,
        contextlib.AsyncExitStack() as stack,
    ):
        port = free_port()
        gateway = await rig.gateway(
            [engine], None, grpc_port=port,
            dispatch={"cap": RUNNING}, queue={"maxRequests": 2 * MOST, "ttl": "1h"},
            limits={"bodiesBytes": bodies_bytes},
            timeouts={"firstToken": "2h", "drain": "1s"},
            policy={"name": "urgency"}, classes=[{"name": URGENT_CLASS, "ttft": "200ms", "tpot": "10ms"}],
        )  # fmt: skip

        async def urgent() -> list[float]:
            """The times to the first token of the urgent calls."""
            engine.first_s = ANSWER_S
            return await steady_calls.made(
                lambda: first_token_of_urgent_s(rig, gateway.url), count=URGENT, within_s=URGENT_S
            )

        alone = await urgent()
        engine.first_s = 3600
        before, opened = gateway.memory, list[tuple[grpc_peer.Peer, list[int]]]()

        async def waiting() -> float:
            return float(rig.value(await rig.metrics(gateway), "tidegate_queue_depth"))

        for first in range(0, len(messages), STREAMS_A_CONNECTION):
            peer = await stack.enter_async_context(grpc_peer.connected(f"127.0.0.1:{port}"))
            following.create_task(peer.follow())
            numbers = []
            for message in messages[first : first + STREAMS_A_CONNECTION]:
                while peer.credit < len(message):
                    await asyncio.sleep(0.01)
                numbers.append(peer.open(grpc_peer.GENERATE, message=message, ends=True))
                await peer.writer.drain()
                if not opened and len(numbers) == RUNNING:
                    await until(lambda: engine.running == RUNNING)
            opened.append((peer, numbers))

        async def all_wait() -> bool:
            return await waiting() == MOST

        await until(all_wait, 900)
        grown, configured = gateway.memory - before, MOST * WAITING_KIB * KIB + bodies_bytes
        engine.first_s = ANSWER_S
        first, numbers = opened[0]
        for number in numbers[:RUNNING]:
            first.writer.write(h2.frame(h2.RST_STREAM, 0, number, CANCEL.to_bytes(4)))
        del numbers[:RUNNING]
        async with answer_probe.probed(gateway.url, tmp_path / "answers"):
            beside = await urgent()
        assert await waiting() > 0, "the urgent calls came while others waited"
        engine.first_s = 0.0
        awaited = [peer.answers[number] for peer, numbers in opened for number in numbers]
        await until(lambda: all(answer.is_whole for answer in awaited), 900)
        done = sum(answer.head.get("grpc-status") == "0" for answer in awaited)
        figure(f"{MOST} calls that wait over gRPC: answered", str(done), goal="all", met=done >= MOST)
        figure(f"{MOST} calls that wait over gRPC: memory, share of the configured bytes", f"{grown / configured:.0%}",
               goal="at most 120%", met=grown <= TOLERANCE * configured)  # fmt: skip
        alone_s, beside_s = (steady_calls.percentile(times, 0.95) for times in (alone, beside))
        figure(f"{MOST} calls that wait over gRPC: TTFT p95 of urgent calls, alone and beside them, s",
               f"{alone_s:.3f}, {beside_s:.3f}", goal="at most twice", met=beside_s <= 2 * alone_s)  # fmt: skip
        health_s = steady_calls.percentile(answer_probe.times_s(tmp_path / "answers"), 0.99)
        figure(f"{MOST} calls that wait over gRPC: /health p99, ms", f"{1000 * health_s:.0f}", goal="below 100",
               met=health_s < 0.1)  # fmt: skip
        assert done >= MOST
        assert await waiting() == 0


def message_of(characters: int) -> bytes:
    request = inference_pb2.GenerateRequest(model="fake", prompt="x" * characters, max_tokens=1)
    return grpc_peer.message(request.SerializeToString())


async def test_very_many_open_streams_take_little_memory_each(rig: Any, until: Any, figure: Any) -> None:
    count = affordable_files.affordable(MOST_STREAMS, FILES_A_STREAM)
    async with fake_engine.engine(tokens=10, hang_after=2) as engine:
        gateway = await rig.gateway(
            [engine], None,
            dispatch={"cap": None}, limits={"connections": 2 * MOST_STREAMS, "idle": "1h"}, timeouts={"nextToken": "1h"},
        )  # fmt: skip
        before, port = gateway.memory, int(gateway.url.rpartition(":")[2])
        body = orjson.dumps({"model": "fake", "prompt": "x", "max_tokens": 10, "stream": True})

        async def begun(number: int) -> socket.socket:
            """A stream of which the first tokens have come."""
            one = await connect(port, number)
            await post(one, body)
            read = b""
            while b"w1" not in read:
                read += await asyncio.get_running_loop().sock_recv(one, 4096)
            return one

        with contextlib.ExitStack() as stack:
            for first in range(0, count, TOGETHER):
                numbers = range(first, min(first + TOGETHER, count))
                for one in await asyncio.gather(*map(begun, numbers)):
                    stack.enter_context(one)
            assert engine.running == count
            each = (gateway.memory - before) / count / KIB
        figure(f"{count} open streams: KiB each", f"{each:.0f}", goal=f"at most {STREAM_KIB}", met=each <= STREAM_KIB)
        assert each <= STREAM_KIB
        await until(lambda: engine.running == 0)
