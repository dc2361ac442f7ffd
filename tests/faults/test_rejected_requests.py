"""What a gateway spends on requests that it rejects: oversize ones, and those with costly parameters."""

import asyncio
import zlib
from typing import Any

import orjson
import pytest

import fake_engine
from tidegate_gateway import gateway_settings

pytestmark = pytest.mark.faults

EACH, TOGETHER = 100, 10
CHAT = "/v1/chat/completions"
GOAL_MS = 5.0
BODY_MIB = gateway_settings.Limits().body_bytes // 2**20


def rejected(**fields: Any) -> bytes:
    body = orjson.dumps({"model": "fake", "messages": [{"role": "user", "content": "hello"}], **fields})
    return framed(body)


def framed(body: bytes, *lines: str) -> bytes:
    head = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close", *lines]
    if not any(line.startswith(("Content-Length", "Transfer-Encoding")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


def picture(address: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]


REQUESTS = {
    "Content-Length of 1 GB": framed(b"", "Content-Length: 1000000000"),
    "a zip bomb": framed(zlib.compress(b" " * 2**26), "Content-Encoding: deflate"),
    "a header of 64 KiB": framed(b"{}", "X-Long: " + "x" * 65536),
    "100,000 headers": framed(b"{}", *[f"x{number}: 1" for number in range(100_000)]),
    "n": rejected(n=10**9),
    "best_of": rejected(best_of=100),
    "logprobs": rejected(logprobs=True, top_logprobs=10**6),
    "max_tokens": rejected(max_tokens=10**19),
    "a million stop strings": rejected(stop=["x"] * 1_000_000),
    "a grammar of 10 MB": rejected(guided_grammar="x" * 10_000_000),
    "a pattern of 7 MB": rejected(guided_regex="x" * 7_000_000),
    "a schema of 7 MB": rejected(response_format={"json_schema": {"schema": {"pattern": "x" * 7_000_000}}}),
    "a schema of 300,000 fields": rejected(guided_json={str(number): 1 for number in range(300_000)}),
    "chat_template": rejected(chat_template="{{ messages }}"),
    "prompt_embeds": rejected(prompt_embeds="AAAA"),
    "a picture of the link-local network": rejected(messages=picture("http://169.254.169.254/latest")),
    "a file": rejected(messages=picture("file:///etc/passwd")),
    "10,000 levels": framed(b'{"model":"fake","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
}


async def sent(port: int, request: bytes) -> int:
    """The status of the answer, which may come before the request has gone out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def test_a_rejected_request_costs_little(rig: Any, figure: Any) -> None:
    used_ms: dict[str, float] = {}
    async with fake_engine.engine() as engine:
        gateway = await rig.gateway([engine], None)
        port = int(gateway.url.rpartition(":")[2])
        before, peak_before = gateway.memory, gateway.peak_memory
        for request in REQUESTS.values():
            await sent(port, request)
        peak = (gateway.peak_memory - peak_before) / 2**20
        for name, request in REQUESTS.items():
            cpu_s = gateway.cpu_s
            for _ in range(EACH // TOGETHER):
                found = await asyncio.gather(*[sent(port, request) for _ in range(TOGETHER)])
                assert all(400 <= status < 500 for status in found), (name, found)
            used_ms[name] = 1000 * (gateway.cpu_s - cpu_s) / EACH
        grown = (gateway.memory - before) / 2**20
        assert not engine.bodies, "nothing reached the engine"
    for name, milliseconds in used_ms.items():
        figure(f"rejected, {name}: CPU time each, ms", f"{milliseconds:.1f}", goal=f"below {GOAL_MS:.0f}",
               met=milliseconds < GOAL_MS)  # fmt: skip
    figure("rejected: most memory of one request meanwhile, MiB", f"{peak:.0f}", goal=f"at most {2 * BODY_MIB}",
           met=peak <= 2 * BODY_MIB)  # fmt: skip
    figure("rejected: memory that stays, MiB", f"{grown:.0f}", goal="at most 16", met=grown <= 16)
    assert max(used_ms.values()) < 200, used_ms
