"""What a tenant loses while another one floods the pool, and what clients cost that do not read their streams."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import affordable_files
import grpc
import orjson
import pytest
import steady_calls

import fake_engine
import tidegate_profiles
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.faults


@dataclass(frozen=True)
class Flood:
    """The calls that a tenant keeps open from one instant on."""

    calls: int
    words: int
    """Of each prompt, one or two tokens each."""
    tokens: int
    """Of each answer."""
    alone_s: float = 0.0
    """Seconds before the honest tenant returns."""


HONEST_CALLS, HONEST_S = 120, 30.0
FLOODERS = 300
"""Calls that the flooding tenant keeps open: about five times what the engine can run."""
PROFILE = "a100-qwen1.5-7b"
MUCH_MEMORY = "a100-70b-tp8"
"""The places of its batch are taken long before its memory."""
FLOODS = {
    "short": Flood(calls=1400, words=20, tokens=300),
    "long prompts": Flood(calls=100, words=4000, tokens=300),
    "long answers": Flood(calls=600, words=20, tokens=1500, alone_s=32.0),
}
"""The first has more than twice the places of two engines."""
FIRST_PROMPTS = "570 prompts at one instant take 2 s through two gateways (decision 65)"
DEEP_BATCH = "each step computes a batch of long answers that began before (decision 53)"
NUMBERS = itertools.count()
"""No two prompts begin alike."""
SLOW_READERS = {"HTTP": 2000, "gRPC": 2000}
TOKENS = 5000
"""Of 1 kB each: more than the buffers of all sockets on the way to a client hold."""
UNREAD_KIB = 60
FILES_A_READER, STREAMS_A_CONNECTION = 2, 100
KIB = 1024


async def first_token_s(
    http: Any, url: str, tenant: str, *, words: int, tokens: int, claims: Any = None, model: str = "sim", n: int = 1
) -> float | str:
    """The time to the first token of a stream; the status and code of a rejection."""
    prompt = f"{next(NUMBERS)} " + "word " * words
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "n": n}
    sent_at_s = time.monotonic()
    async with http.post(
        url + "/v1/completions", json=body, headers={"x-tidegate-tenant": tenant, **(claims or {})}
    ) as answer:
        if answer.status != 200:
            return f"{answer.status} {(await answer.json())['error']['code']}"
        first_s = None
        async for line in answer.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = time.monotonic() - sent_at_s
        assert first_s is not None
        return first_s


async def honest(call: Callable[[], Awaitable[float | str]]) -> list[float | str]:
    """The answers to the calls of the honest tenant."""
    return await steady_calls.made(call, count=HONEST_CALLS, within_s=HONEST_S)


def percentile(times: list[float | str], share: float) -> float:
    return steady_calls.percentile((value for value in times if isinstance(value, float)), share)


@pytest.mark.parametrize(
    ("claims", "gateways", "apart", "model", "short"),
    [
        ({}, 1, False, "sim", False),
        ({"x-tidegate-slo-ttft-ms": "1", "x-tidegate-slo-tpot-ms": "1"}, 1, False, "sim", False),
        ({}, 2, False, "sim", False),
        ({}, 2, True, "sim", False),
        ({}, 1, False, "adapter", False),
        ({}, 1, False, "sim", True),
        ({}, 1, False, "adapter", True),
    ],
    ids=["plain", "claims", "two gateways", "one of two gateways", "adapter", "short", "short, adapter"],
)
async def test_a_flood_moves_the_first_tokens_of_an_honest_tenant_a_little(
    rig: Any, figure: Any, free_port: Any, claims: Any, gateways: int, apart: bool, model: str, short: bool
) -> None:
    tenants = [{"name": name, "weight": 1} for name in ("honest", "flood")]
    engines = [await rig.engine(speed=4, adapter="adapter")]
    engines += [await rig.engine(speed=4) for _ in range(3 if model == "adapter" else 0)]
    store = None if gateways == 1 else (await rig.valkey(port=free_port(), folder=rig.folder / "data")).url
    classes = [{"name": "chat", "ttft": "1s", "tpot": "60ms"}] if short else []
    settings = {"tenants": tenants, "classes": classes, **({"defaultClass": "chat"} if short else {})}
    urls = [(await rig.gateway(engines, store, **settings)).url for _ in range(gateways)]
    words, tokens = (2, 1) if short else (600, 200)
    turn = itertools.cycle(urls)

    async def one() -> float | str:
        url = urls[0] if apart else next(turn)
        return await first_token_s(rig.http, url, "honest", words=200, tokens=50, model=model)

    alone = await honest(one)
    flooding = True
    flooded: list[float | str] = []

    async def flood() -> None:
        while flooding:
            url = next(turn)
            answer = first_token_s(rig.http, url, "flood", words=words, tokens=tokens, claims=claims, model=model)
            flooded.append(await answer)
            if isinstance(flooded[-1], str):
                await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        floods = [group.create_task(flood()) for _ in range(FLOODERS)]
        await asyncio.sleep(3)
        during = await honest(one)
        flooding = False
        for task in floods:
            task.cancel()
    name = "flood with claims" if claims else "flood through two gateways" if gateways > 1 else "flood"
    name = "flood of short calls under a class with targets" if short else name
    name += " for an adapter of one engine in four" if model == "adapter" else ""
    name += ", of which the honest tenant uses one" if apart else ""
    refused = [value for value in during if isinstance(value, str)]
    for share in (0.5, 0.95):
        before, after = percentile(alone, share), percentile(during, share)
        figure(f"{name}: TTFT p{share * 100:.0f} of the honest tenant, alone and flooded, s", f"{before:.3f}, {after:.3f}",
               goal="below twice", met=after < 2 * before)  # fmt: skip
    figure(f"{name}: calls of the honest tenant refused", str(len(refused)), goal="0", met=not refused)
    assert not refused
    assert percentile(during, 0.95) < 5, "without shares of tenants it was 60 s"


@pytest.mark.parametrize(
    ("flood", "gateways", "model"),
    [("short", 1, "sim"), ("short", 2, "sim"), ("short", 4, "sim"), ("short", 2, "adapter"),
     ("long prompts", 1, "sim"), ("long prompts", 2, "sim"), ("long answers", 1, "sim"), ("long answers", 2, "sim")],
)  # fmt: skip
async def test_the_first_seconds_of_a_flood_are_as_good_as_the_rest(
    rig: Any, figure: Any, free_port: Any, flood: str, gateways: int, model: str
) -> None:
    """All calls of the flood come at once, to engines with 256 places. The short ones take 6 s or more each, so one that
    has got a place too many keeps it for long. Those with long prompts would take all KV memory, and half a minute of each
    engine until they are computed. Those with long answers have the pool alone for so long that the honest tenant competes
    no more, and fill the memory of the engines. The gateways tell each other five times a second what tenants have."""
    kind = FLOODS[flood]
    tenants = [{"name": name, "weight": 1} for name in ("honest", "flood")]
    adapters = ["adapter", *[None] * 3] if model == "adapter" else [None] * 2
    engines = [await rig.engine(speed=1, profile=PROFILE, adapter=adapter) for adapter in adapters]
    cost = tidegate_profiles.load(PROFILE)["cost"]
    url = (await rig.valkey(port=free_port(), folder=rig.folder / "data")).url
    settings = {"tenants": tenants, "store": {"url": url}}
    if flood == "short":
        classes = [{"name": "chat", "ttft": "1s", "tpot": "60ms"}]
        settings |= {"classes": classes, "defaultClass": "chat"}
    urls = [(await rig.gateway(engines, url, cost=cost, **settings)).url for _ in range(gateways)]
    turn = itertools.cycle(urls)

    async def one() -> float | str:
        return await first_token_s(rig.http, urls[0], "honest", words=200, tokens=50, model=model)

    async def floods() -> None:
        while True:
            url, words, tokens = next(turn), kind.words, kind.tokens
            if isinstance(await first_token_s(rig.http, url, "flood", words=words, tokens=tokens, model=model), str):
                await asyncio.sleep(0.05)

    alone = await steady_calls.made(one, count=40, within_s=10.0)
    tasks = [asyncio.ensure_future(floods()) for _ in range(kind.calls)]
    await asyncio.sleep(kind.alone_s)
    during = await honest(one)
    for task in tasks:
        task.cancel()
    when = "from its return" if kind.alone_s else "from the first call of the flood"
    name = f"flood of {kind.calls} calls at once ({flood}) through {gateways} gateway" + ("s" if gateways > 1 else "")
    name += " for an adapter of one engine in four" if model == "adapter" else ""
    refused = [value for value in during if isinstance(value, str)]
    for share in (0.5, 0.95):
        before, after = percentile(alone, share), percentile(during, share)
        figure(f"{name}: TTFT p{share * 100:.0f} of the honest tenant, alone and {when}, s",
               f"{before:.3f}, {after:.3f}", goal="below twice", met=after < 2 * before,
               known=DEEP_BATCH if kind.alone_s else "")  # fmt: skip
    longest = max(value for value in during if isinstance(value, float))
    figure(f"{name}: the longest TTFT of the honest tenant, s", f"{longest:.2f}", goal="1", met=longest < 1)
    figure(f"{name}: calls of the honest tenant refused", str(len(refused)), goal="0", met=not refused)
    assert not refused
    most_s = 5 if flood == "long answers" else 2
    assert percentile(during, 0.95) < most_s, "it was 7 s to 38 s (decisions 51 and 52)"


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize(
    ("several", "calls", "words", "tokens", "profile", "sequences"),
    [
        (4, 3, 3500, 5, PROFILE, 1),
        (4, 3, 8000, 100, PROFILE, 1),
        (10, 57, 20, 1500, MUCH_MEMORY, 1),
        (10, 8, 3000, 300, MUCH_MEMORY, 16),
    ],
    ids=["each below its part", "alone in engines", "all places", "many sequences"],
)
async def test_several_tenants_delay_the_short_prompts_of_another_one_a_little(
    rig: Any,
    figure: Any,
    free_port: Any,
    gateways: int,
    several: int,
    calls: int,
    words: int,
    tokens: int,
    profile: str,
    sequences: int,
) -> None:
    """Nobody floods the pool: four tenants have three calls open each, which keep all engines computing prompts, or ten
    tenants have all places of two engines together, for long answers, and no call of theirs waits; a third one is down. So
    do ten tenants with a few calls of many sequences each, which have a prompt in common."""
    own_words = 20 if several > 4 else 200  # less work than the part of one tenant
    others = [f"tenant {number}" for number in range(several)]
    tenants = [{"name": name, "weight": 1} for name in ("honest", *others)]
    count = 3 if profile == MUCH_MEMORY else 2
    engines = [await rig.engine(speed=1, profile=profile, prefix_cache=sequences > 1) for _ in range(count)]
    cost = tidegate_profiles.load(profile)["cost"]
    url = (await rig.valkey(port=free_port(), folder=rig.folder / "data")).url
    settings = {"tenants": tenants, "store": {"url": url}}
    urls = [(await rig.gateway(engines, url, cost=cost, **settings)).url for _ in range(gateways)]
    turn = itertools.cycle(urls)
    for engine in engines[2:]:
        engine.kill()

    async def one() -> float | str:
        return await first_token_s(rig.http, urls[0], "honest", words=own_words, tokens=50)

    async def reads(tenant: str) -> None:
        while True:
            await first_token_s(rig.http, next(turn), tenant, words=words, tokens=tokens, n=sequences)

    alone = await steady_calls.made(one, count=40, within_s=10.0)
    tasks = [asyncio.ensure_future(reads(tenant)) for tenant in others for _ in range(calls)]
    during = await honest(one)
    for task in tasks:
        task.cancel()
    name = (
        f"{several} tenants with {calls} calls of {words:,} words and {tokens:,} tokens open each, {gateways} gateway"
    )
    name += "s" * (gateways > 1) + (f", {sequences} sequences each" if sequences > 1 else "")
    known = FIRST_PROMPTS if calls > 50 and gateways > 1 else ""
    refused = [value for value in during if isinstance(value, str)]
    longest = max(value for value in during if isinstance(value, float))
    before, after = percentile(alone, 0.95), percentile(during, 0.95)
    figure(f"{name}: TTFT p95 of another tenant's short prompts, alone and beside them, s", f"{before:.3f}, {after:.3f}",
           goal="0.5", met=after < 0.5, known=known)  # fmt: skip
    figure(f"{name}: the longest TTFT, s", f"{longest:.2f}", goal="1", met=longest < 1, known=known)
    assert not refused
    assert longest < 5, "it was 12 s (decisions 54 and 65)"


@pytest.mark.parametrize("wire", ["HTTP", "gRPC"])
@pytest.mark.parametrize("token_bytes", [1000, 10_000])
async def test_clients_that_do_not_read_cost_little_and_stop_the_engine(
    rig: Any, figure: Any, free_port: Any, wire: str, token_bytes: int
) -> None:
    async with (
        fake_engine.engine(tokens=TOKENS, padding="x" * token_bytes, kernel_bytes=16 * KIB) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        settings = {
            "dispatch": {"cap": None},
            "limits": {"write": "10m", "connections": 20_000, "connectionsPerAddress": 20_000},
            "queue": {"shareAmongTenants": False},
        }
        grpc_port = free_port()
        gateway = await rig.gateway([engine], None, grpc_port=grpc_port, **settings)
        before = gateway.memory
        body = orjson.dumps({"model": "fake", "prompt": "x", "stream": True, "max_tokens": TOKENS})
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        readers = affordable_files.affordable(SLOW_READERS[wire], FILES_A_READER)
        for number in range(readers):
            if wire == "HTTP":
                slow = stack.enter_context(socket.socket())
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.setblocking(False)
                slow.bind((f"127.0.0.{2 + number // 5000}", 0))
                address = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
                await asyncio.get_running_loop().sock_connect(slow, address)
                await asyncio.get_running_loop().sock_sendall(slow, request)
            else:
                if number % STREAMS_A_CONNECTION == 0:
                    options = [("grpc.use_local_subchannel_pool", 1)]
                    channel = await stack.enter_async_context(
                        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=options)
                    )
                message = inference_pb2.GenerateRequest(model="fake", prompt="x", max_tokens=TOKENS)
                stream = inference_pb2_grpc.InferenceStub(channel).Generate(message)
                assert (await stream.read()).accepted.engine
        most = 0
        for _ in range(30):
            await asyncio.sleep(0.5)
            most = max(most, gateway.memory)
        each = (most - before) / readers / KIB
        figure(f"{readers} clients of {wire} that do not read, tokens of {token_bytes:,} bytes: KiB each", f"{each:.0f}",
               goal=f"at most {UNREAD_KIB}", met=each <= UNREAD_KIB)  # fmt: skip
        assert engine.running == readers, "no engine can send what no client reads"
        assert each <= UNREAD_KIB
