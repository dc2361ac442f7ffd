"""How long a hostile body of the largest size keeps the gateway busy. While it does, no other client is served."""

import io
import pathlib
from typing import Any

import orjson
import pytest

from tidegate_gateway import fake_engine

pytestmark = pytest.mark.faults

BYTES = 8 * 1024 * 1024 - 1000
TICK_S = 0.01
"""The resolution of the kernel's account of CPU time."""
REPEATS = 5


def chat(*content: Any, **fields: Any) -> bytes:
    return orjson.dumps(
        {"model": "fake", "messages": [{"role": "user", "content": item} for item in content], **fields}
    )


def bodies() -> dict[str, bytes]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200}}
    nested = {"type": "x", "a": {"b": [{"c": ["d"] * 10}] * 10}}
    return {
        "one text": chat("x " * (BYTES // 2)),
        "a text of escapes": b'{"model":"fake","messages":[{"role":"user","content":"'
        + b"\\u00e9" * (BYTES // 6)
        + b'"}]}',
        "20,000 messages": chat(*["x" * 300] * 19_999),
        "20,000 parts": chat([{"type": "text", "text": "x" * 300}] * 19_999),
        "20,000 pictures": chat([image] * 19_999),
        "nested parts": chat([nested] * 1500),
        "190,000 fields": chat("x", **{f"f{number}": number for number in range(190_000)}),
        "190,000 fields of metadata": chat("x", metadata={f"f{number}": number for number in range(190_000)}),
        "60,000 lists": chat("x", **{f"f{number}": [[]] for number in range(60_000)}),
        "100,000 levels": b'{"model":"fake","messages":[],"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "11,000 tools": chat("x", tools=[{"type": "function", "function": {"name": "a"}}] * 11_000),
        "a body that is cut off": chat(*["x" * 300] * 19_999)[:-10],
        "long numbers": b'{"model":"fake","a":[' + b",".join([b"1" * 400] * 20_000) + b"]}",
    }


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


async def test_no_body_keeps_the_gateway_busy_for_long(rig: Any, figure: Any) -> None:
    async with fake_engine.engine() as engine:
        gateway = await rig.gateway([engine], None)
        worst = ("", 0.0)
        before = gateway.memory
        for name, body in bodies().items():
            assert len(body) <= BYTES + 1000
            began_s = cpu_s(gateway.child.pid)
            for _ in range(REPEATS):
                headers = {"content-type": "application/json"}
                async with rig.http.post(
                    gateway.url + "/v1/chat/completions", data=io.BytesIO(body), headers=headers
                ) as answer:
                    assert answer.status in (200, 400, 413), (name, await answer.text())
            worst = max(worst, (name, (cpu_s(gateway.child.pid) - began_s) / REPEATS), key=lambda item: item[1])
        grown = (gateway.memory - before) / 2**20
        figure(f"hostile bodies: CPU of the worst ({worst[0]}), ms", f"{1000 * worst[1]:.0f}", goal="at most 50",
               met=worst[1] <= 0.05)  # fmt: skip
        figure("hostile bodies: memory that stays, MiB", f"{grown:.0f}", goal="below 256", met=grown < 256)
        assert worst[1] < 0.5, worst
        assert grown < 512
