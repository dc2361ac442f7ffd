"""Processes and load that the benchmarks of the gateway share: start a process, wait for its page, send requests to it, and
read the CPU time that it spends."""

import asyncio
import contextlib
import json
import math
import pathlib
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import grpc

from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

HERE = pathlib.Path(__file__).resolve().parent
START_S = 60.0
TEXT = {"role": "user", "content": "Which of the tables has a column with the name of the customer? " * 4}
REQUEST_BODY = json.dumps({"model": "fast", "messages": [TEXT], "max_tokens": 128}).encode()
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95% by degrees of freedom, from 1; beyond the table the value is about 2."""


@contextlib.contextmanager
def process(command: Sequence[object]) -> Iterator[int]:
    """A process that is ended with the context; its id."""
    child = subprocess.Popen([str(word) for word in command])
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
def engine(*, tokens: int, block_tokens: int, pace_ms: float) -> Iterator[int]:
    """An engine with fixed answers (`fast_engine.py`) that is ready; its port."""
    port = free_port()
    flags = ["--port", port, "--tokens", tokens, "--block-tokens", block_tokens, "--pace-ms", pace_ms]
    with process([sys.executable, HERE / "fast_engine.py", *flags]):
        await_page(f"http://127.0.0.1:{port}/health")
        yield port


def settings(port: int, engine_port: int, grpc_port: int | None = None) -> dict[str, object]:
    """The settings of a gateway on `port` in front of that engine."""
    return {
        "listen": {"host": "127.0.0.1", "port": port, "grpcPort": grpc_port, "adminPort": None},
        "engines": [{"url": f"http://127.0.0.1:{engine_port}", "profile": "a100-qwen1.5-4b"}],
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_page(url: str, body: bytes | None = None) -> None:
    """Waits until a GET, or a POST of the body, is answered with success."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, urllib.error.URLError):
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
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


async def load(port: int, mode: str, requests: int, connections: int) -> int:
    """Sends `requests` requests over `connections` connections; the number of blocks in the answers."""
    left = iter(range(requests))
    counts = await asyncio.gather(*(client(port, mode, left) for _ in range(connections)))
    return sum(counts)


async def grpc_load(port: int, requests: int, connections: int) -> int:
    """Calls of `Inference.Generate` over so many connections; the number of messages in the answers."""
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

    return sum(await asyncio.gather(*(client() for _ in range(connections))))


async def client(port: int, mode: str, left: Iterator[int]) -> int:
    """One connection, which carries requests until none is left."""
    body = json.dumps({**json.loads(REQUEST_BODY), "stream": mode == "stream"}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer none\r\nAccept: application/json\r\nUser-Agent: benchmark\r\n"
        b"X-Tidegate-Tenant: bench\r\nX-Tidegate-Deadline-Ms: 30000\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    blocks = 0
    try:
        for _ in left:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"benchmark of the gateway: the gateway answered {head[:200]!r}")
            blocks += await answer(reader, head.lower())
    finally:
        writer.close()
    return blocks


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
