"""One client with a costly form or table does not hold the event loop: its work is bounded, and done in small steps."""

import io
from typing import Any

import aiohttp
import event_loop_turns
import pytest

from tidegate_gateway import fake_engine
from tidegate_gateway.edge import relquery_http
from tidegate_gateway.openai import parsed_request

PATH = "/v1/relqueries"


def form(**fields: bytes) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value.decode())
    data.add_field("rows", io.BytesIO(b"x\na\n"), filename="t.csv", content_type="text/csv")
    return data


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({f"f{i}": b"[" + b"[]," * 119_990 + b"1]" for i in range(63)}, "template", "larger than 1048576 bytes"),
        ({f"f{i}": b"[" + b"[]," * 20_000 + b"1]" for i in range(16)}, "f5", "more than 120000 lists"),
    ],
    ids=["bytes", "parts"],
)
async def test_the_fields_of_a_form_have_one_bound_before_any_is_parsed(
    up: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, bytes], param: str, words: str
) -> None:
    parsed: list[int] = []
    decoded = parsed_request.decoded
    monkeypatch.setattr(parsed_request, "decoded", lambda raw: (parsed.append(len(raw)), decoded(raw))[1])
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, _ = await client.send("POST", PATH, data=form(**fields))
        assert (status, error["error"]["param"]) == (400, param)
        assert words in error["error"]["message"]
        assert not parsed


async def test_the_fields_of_a_form_are_parsed_a_few_at_a_time(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, field = event_loop_turns.Turns(), relquery_http._field

    def counted(name: str, raw: bytes, part: Any) -> Any:
        turns.add(part.end - part.first)
        return field(name, raw, part)

    monkeypatch.setattr(relquery_http, "_field", counted)
    fields = {f"f{i}": b'"' + b"x" * 20_000 + b'"' for i in range(48)}
    async with fake_engine.engine() as engine, up(engine) as client, event_loop_turns.running(turns):
        await client.send("POST", PATH, data=form(**fields))
    assert sum(turns.counts.values()) == 48 * 20_002
    assert max(turns.counts.values()) <= 2 * relquery_http.FIELDS_STEP_BYTES
