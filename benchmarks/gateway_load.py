"""Processes and load that the benchmarks of the gateway share: start a process, wait for its page, send requests to it, and
read the CPU time that it spends."""

import asyncio
import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from tidegate_cli import processes
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

HERE = pathlib.Path(__file__).resolve().parent
START_S = 300.0
"""LiteLLM takes a minute on a busy machine."""
SENTENCE = "Which of the tables has a column with the name of the customer? "
TEXT = {"role": "user", "content": SENTENCE * 4}
REQUEST_BODY = json.dumps({"model": "fast", "messages": [TEXT], "max_tokens": 128}).encode()
PACED_TOKENS = 32
"""Of a stream of the mode `paced`."""
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95% by degrees of freedom, from 1; beyond the table the value is about 2."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """Requests that were answered, and the blocks in which their answers came."""

    requests: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A gateway process."""

    name: str
    pid: int
    port: int
    grpc_port: int | None


@contextlib.contextmanager
def process(command: Sequence[object], *, quiet: bool = False) -> Iterator[int]:
    """A process that is ended with the context; its id. What a `quiet` one writes to its standard output is dropped."""
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL if quiet else None)
    try:
        yield child.pid
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def engine(*, tokens: int, block_tokens: int, pace_ms: float, paced_tokens: int = 0) -> Iterator[int]:
    """An engine with fixed answers (`fast_engine.py`) that is ready; its port."""
    port = processes.free_port()
    flags = ["--port", port, "--tokens", tokens, "--block-tokens", block_tokens, "--pace-ms", pace_ms]
    flags += ["--paced-tokens", paced_tokens]
    with process([sys.executable, HERE / "fast_engine.py", *flags]):
        await_page(f"http://127.0.0.1:{port}/health")
        yield port


def settings(port: int, engine_port: int, grpc_port: int | None = None) -> dict[str, object]:
    """The settings of a gateway on `port` in front of that engine."""
    return {
        "listen": {"host": "127.0.0.1", "port": port, "grpcPort": grpc_port, "adminPort": None},
        "engines": [{"url": f"http://127.0.0.1:{engine_port}", "profile": "a100-qwen1.5-4b"}],
    }


def await_page(url: str, body: bytes | None = None) -> None:
    """Waits until a GET, or a POST of the body, is answered with success. The tenant is that of the load, because a gateway
    that has seen two tenants holds calls of one that would take all places."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, urllib.error.URLError):
            headers = {"Content-Type": "application/json", "X-Tidegate-Tenant": "bench"}
            request = urllib.request.Request(url, body, headers)
            urllib.request.urlopen(request, timeout=5).close()
            return
        time.sleep(0.05)
    raise SystemExit(f"benchmark of the gateway: {url} did not answer within {START_S:.0f} s")


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process and its children so far: clock_getcpuclockid(3), which has nanoseconds where
    /proc/PID/stat has ticks."""
    return sum(time.clock_gettime(~each << 3 | 2) for each in tree(pid))


def tree(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for each in found:
        for task in pathlib.Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    pages = sum(int(pathlib.Path(f"/proc/{each}/statm").read_text().split()[1]) for each in tree(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def load(
    port: int, mode: str, requests: int, connections: int, *, prompt_bytes: int = 0, within_s: float = math.inf
) -> Sent:
    """Sends `requests` requests over `connections` connections; none begins after `within_s` seconds."""
    asked = message(mode, prompt_bytes)
    end_s = time.monotonic() + within_s
    left = iter(range(requests))
    counts = await asyncio.gather(*(client(port, asked, left, end_s) for _ in range(connections)))
    return Sent(requests=sum(count.requests for count in counts), blocks=sum(count.blocks for count in counts))


async def grpc_load(port: int, requests: int, connections: int) -> Sent:
    """Calls of `Inference.Generate` over so many connections. The blocks are the messages of the answers."""
    left = iter(range(requests))
    asked = inference_pb2.GenerateRequest(
        model="fast",
        messages=inference_pb2.Messages(messages=[inference_pb2.Message(**TEXT)]),
        max_tokens=128,
        tenant="bench",
        deadline_ms=30_000,
    )

    async def client() -> int:
        messages = 0
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            for _ in left:
                async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(asked):
                    messages += 1
        return messages

    return Sent(requests=requests, blocks=sum(await asyncio.gather(*(client() for _ in range(connections)))))


def message(mode: str, prompt_bytes: int = 0) -> bytes:
    """A request of the mode, with a prompt of so many bytes (0 = a short one)."""
    asked = json.loads(REQUEST_BODY)
    if prompt_bytes:
        text = SENTENCE * (prompt_bytes // len(SENTENCE) + 1)
        asked["messages"] = [{"role": "user", "content": text[:prompt_bytes]}]
    if mode != "whole":
        asked["stream"] = True
    if mode == "paced":
        asked["max_tokens"] = PACED_TOKENS
    body = json.dumps(asked).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer none\r\nAccept: application/json\r\nUser-Agent: benchmark\r\n"
        b"X-Tidegate-Tenant: bench\r\nX-Tidegate-Deadline-Ms: 30000\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )


async def client(port: int, asked: bytes, left: Iterator[int], end_s: float) -> Sent:
    """One connection, which carries requests until none is left or the time is over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = Sent(requests=0, blocks=0)
    try:
        while time.monotonic() < end_s and next(left, None) is not None:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"benchmark of the gateway: the gateway answered {head[:200]!r}")
            sent.blocks += await answer(reader, head.lower())
            sent.requests += 1
    finally:
        writer.close()
    return sent


async def answer(reader: asyncio.StreamReader, head: bytes) -> int:
    """Reads one answer; the number of its blocks."""
    if b"transfer-encoding: chunked" not in head:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
        return 1
    blocks = 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
        blocks += 1
    await reader.readexactly(2)
    return blocks


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 2.0 + 2.0 / (len(values) - 1)
    width = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - width, mean + width
