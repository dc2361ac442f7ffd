"""Bodies of many small values: they take turns, and a call keeps their JSON while it waits."""

import asyncio
import json
from typing import Any

import orjson
import pytest

from tidegate_gateway import fake_engine, loop_steps
from tidegate_gateway.openai import bounded_json, engine_body, engine_fields

MANY = {"type": "object", "properties": {f"f{index}": {"type": "string"} for index in range(1000)}}


@pytest.mark.parametrize(
    ("value", "costly"),
    [
        ("x" * 60_000, False),
        (list(range(900)), False),
        (list(range(1100)), True),
        (MANY, True),
        ([0] * 500, False),
    ],
)
def test_a_body_of_many_values_is_costly(value: Any, costly: bool) -> None:
    assert bounded_json.is_costly(orjson.dumps(value)) == costly


def test_a_body_is_the_same_after_it_was_packed() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": MANY}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": MANY}},
        "stream_options": {"include_usage": False},
        "vllm_xargs": {"mine": 1},
        "temperature": 0.5,
    }
    packed = dict(body)
    engine_body.pack(packed)
    assert isinstance(packed["response_format"], orjson.Fragment)
    assert json.loads(orjson.dumps(packed)) == body
    assert [packed[name] for name in engine_body.MERGED] == [body[name] for name in engine_body.MERGED]


async def test_a_field_has_a_bound_of_lists_and_objects(up: Any) -> None:
    def schema(count: int) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [[]] * count}}}

    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, _ = await client.ask(response_format=schema(engine_fields.MOST_BRACKETS))
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert (await client.ask(response_format=schema(1000)))[0] == 200
        assert (await client.ask(user="[" * (engine_fields.MOST_BRACKETS + 1)))[0] == 200, "a text has no lists"


async def test_costly_bodies_of_a_tenant_wait_behind_the_first_one_of_another(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, take, order = 0, loop_steps.TenantTurns.take, list[str]()
    may_begin = asyncio.Event()

    async def counted(self: loop_steps.TenantTurns, tenant: str) -> None:
        nonlocal waiting
        waiting += 1
        if tenant == "first":
            await take(self, tenant)
            await may_begin.wait()
            return
        await take(self, tenant)
        order.append(tenant)

    monkeypatch.setattr(loop_steps.TenantTurns, "take", counted)
    async with fake_engine.engine() as engine, up(engine, store=False) as client:

        def ask(tenant: str) -> asyncio.Task[Any]:
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": MANY}}
            return asyncio.create_task(client.ask(headers={"x-tidegate-tenant": tenant}, response_format=form))

        tasks = [ask("first")]
        await until(lambda: waiting == 1)
        tasks += [ask("a") for _ in range(6)]
        await until(lambda: waiting == 7)
        tasks += [ask("b")]
        await until(lambda: waiting == 8)
        may_begin.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 8
    assert order.index("b") <= 1
