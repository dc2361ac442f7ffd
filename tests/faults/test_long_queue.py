"""Very many calls wait: each has its answer in the end, whoever comes beyond the bound is told so at once, and the
memory is that of the calls.

`make test` lets hundreds wait, `make faults` as many of 100,000 as the machine's open files allow.
"""

import asyncio
import contextlib
import os
import random
import resource
import socket
from typing import Any

import orjson
import pytest

from tidegate_gateway import fake_engine

IS_FULL = "TIDEGATE_FAULTS" in os.environ
MOST = 100_000 if IS_FULL else 300
FILES_A_CALL, OTHER_FILES = 3, 1000
"""The client's socket is in the test's process; the gateway needs one for the client and up to one for an engine."""
BEYOND = 50
RUNNING, TOGETHER = 4, 200
CALLS_OF_ADDRESS = 20_000
"""Connections from one loopback address, which has a port for each."""
KIB = 1024

pytestmark = pytest.mark.timeout(1800 if IS_FULL else 300)


def calls() -> int:
    """Calls for which there are open files. A superuser may have more of them."""
    needed = FILES_A_CALL * MOST + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, hard)))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST, (files - OTHER_FILES) // FILES_A_CALL)


async def test_very_many_waiting_calls_are_all_answered(rig: Any, until: Any, figure: Any) -> None:
    rng, count = random.Random(7), calls()
    loop = asyncio.get_running_loop()
    async with fake_engine.engine(tokens=1, first_s=3600) as engine:
        gateway = await rig.gateway(
            [engine], None,
            dispatch={"cap": RUNNING}, queue={"maxRequests": count, "ttl": "1h"},
            limits={"connections": 2 * MOST, "idle": "1h"}, timeouts={"firstToken": "2h", "drain": "1s"},
        )  # fmt: skip
        before, sent_bytes = gateway.memory, 0
        port = int(gateway.url.rpartition(":")[2])

        async def send(number: int) -> socket.socket:
            nonlocal sent_bytes
            prompt = "x" * (100_000 if number % 1000 == 999 else rng.randrange(20, 2000))
            body = orjson.dumps({"model": "fake", "prompt": prompt, "max_tokens": 1})
            sent_bytes += len(body)
            one = socket.socket()
            one.setblocking(False)
            one.bind((f"127.0.0.{2 + number // CALLS_OF_ADDRESS}", 0))
            await loop.sock_connect(one, ("127.0.0.1", port))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            await loop.sock_sendall(one, head % len(body) + body)
            return one

        async def waiting() -> float:
            return float(rig.value(await rig.metrics(gateway), "tidegate_queue_depth"))

        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(await send(number)) for number in range(RUNNING)]
            await until(lambda: engine.running == RUNNING)
            sockets = []
            for first in range(0, count, TOGETHER):
                numbers = range(first, min(first + TOGETHER, count))
                sockets += [stack.enter_context(one) for one in await asyncio.gather(*map(send, numbers))]

            async def all_wait() -> bool:
                return await waiting() == count

            await until(all_wait, 600)
            each = (gateway.memory - before - sent_bytes) / count / KIB
            for number in range(BEYOND):
                one = stack.enter_context(await send(count + number))
                answer = await loop.sock_recv(one, 4096)
                assert answer.startswith(b"HTTP/1.1 429"), answer
                assert b"Retry-After" in answer
            assert await waiting() == count
            engine.first_s = 0.0
            for one in running:
                one.close()
            answers = [await loop.sock_recv(one, 64) for one in sockets]
            answered = sum(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        figure(f"{count} waiting calls: answered", str(answered), goal="all", met=answered >= count)
        figure(f"{count} waiting calls: KiB each beyond their bytes", f"{each:.0f}", goal="at most 60", met=each <= 60)
        assert answered >= count
        assert await waiting() == 0
        await until(lambda: engine.running == 0)
