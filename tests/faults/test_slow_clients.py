"""What honest clients feel beside thousands of clients that send half a head, or half a body, a byte at a time."""

import asyncio
import resource
import time
from typing import Any

import orjson
import pytest
import steady_calls
import test_parsing_floods

import fake_engine

pytestmark = pytest.mark.faults

SLOW, OTHER_FILES = 2000, 500
HONEST_CALLS, HONEST_S = 300, 30.0
BYTE_EACH_S = 2.0
HEAD_S, BODY_S, GRACE_S = 10.0, 30.0, 2.0
"""`limits.idle` and `limits.body`, and what a busy machine may add."""
CLIENTS = r"""
import asyncio, contextlib, json, random, sys, time
port, count, byte_each_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
halves = {"head": head, "body": head + b"Content-Length: 1000\r\n\r\n{"}
longest_s, stopped = dict.fromkeys(halves, 0.0), asyncio.Event()

async def held(kind, number):
    await asyncio.sleep(random.uniform(0, byte_each_s))
    local = (f"127.0.0.{2 + number % 4}", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
    began_s = time.monotonic()

    async def drip():
        writer.write(halves[kind])
        while True:
            await asyncio.sleep(byte_each_s)
            writer.write(b"a")

    dripping = asyncio.create_task(drip())
    with contextlib.suppress(OSError):
        await reader.read()
    dripping.cancel()
    writer.close()
    longest_s[kind] = max(longest_s[kind], time.monotonic() - began_s)

async def client(kind, number):
    while not stopped.is_set():
        await held(kind, number)

async def main():
    asyncio.get_running_loop().add_reader(sys.stdin, stopped.set)
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            for kind in halves:
                group.create_task(client(kind, number))
    print(json.dumps(longest_s))

asyncio.run(main())
"""
"""Clients in a process of their own, so that their work delays neither the honest client nor its engine. Prints the longest
times, in seconds, for which a half head and a half body were kept."""


async def first_token_s(http: Any, url: str) -> float:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 4, "stream": True}
    sent_s = time.monotonic()
    async with http.post(url + "/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.content.readline()
        first_s = time.monotonic() - sent_s
        await answer.read()
        return first_s


async def honest(http: Any, url: str) -> list[float]:
    return await steady_calls.made(lambda: first_token_s(http, url), count=HONEST_CALLS, within_s=HONEST_S)


async def test_clients_that_send_a_byte_at_a_time_delay_nobody(rig: Any, figure: Any) -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(SLOW, files - OTHER_FILES) // 2
    async with fake_engine.engine(first_s=0.02, token_s=0.005) as engine:
        gateway = await rig.gateway([engine], None)
        port = gateway.url.rpartition(":")[2]
        alone = await honest(rig.http, gateway.url)
        before = gateway.memory
        pipes = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
        async with test_parsing_floods.attack(CLIENTS, port, count, BYTE_EACH_S, **pipes) as clients:
            await asyncio.sleep(2 * BYTE_EACH_S)
            beside = await honest(rig.http, gateway.url)
            grown = (gateway.memory - before) / 2**20
            kept = orjson.loads((await clients.communicate(b"stop"))[0])
        assert len(engine.bodies) == 2 * HONEST_CALLS, "no half of a request reached the engine"
    name = f"{2 * count} clients that send a byte at a time"
    for share in (0.5, 0.99):
        least, most = (steady_calls.percentile(times, share) for times in (alone, beside))
        figure(f"{name}: TTFT p{100 * share:.0f} of others, alone and beside, ms", f"{1000 * least:.1f}, {1000 * most:.1f}",
               goal="+20%", met=most < 1.2 * least)  # fmt: skip
    figure(f"{name}: memory, MiB", f"{grown:.0f}", goal="below 100", met=grown < 100)
    for kind, goal_s in (("head", HEAD_S), ("body", BODY_S)):
        longest_s = kept[kind]
        figure(f"{name}: the longest half {kind}, s", f"{longest_s:.1f}", goal=f"at most {goal_s:.0f}",
               met=longest_s <= goal_s + GRACE_S)  # fmt: skip
        assert longest_s < 2 * goal_s + 30
