"""Bodies of many small values: they take turns, and a call keeps their JSON while it waits."""

import asyncio
import gzip
import itertools
import json
import zlib
from typing import Any

import grpc_peer
import orjson
import pytest

import fake_engine
from tidegate_gateway import loop_steps
from tidegate_gateway.openai import bounded_json, engine_body, engine_fields, prompt_prefix
from tidegate_proto.v1 import inference_pb2

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


@pytest.mark.parametrize("fields", [{"messages": [{"role": "user", "content": "x" * 100_000}]}, {"x": [0] * 2000}])
async def test_other_work_runs_between_the_look_at_a_large_prompt_and_its_json(
    up: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    order, read, pack = list[str](), prompt_prefix.read, engine_body.pack

    def noted_read(*arguments: Any) -> Any:
        asyncio.get_running_loop().call_soon(order.append, "others")
        return read(*arguments)

    def noted_pack(body: dict[str, Any]) -> None:
        order.append("pack")
        pack(body)

    monkeypatch.setattr(prompt_prefix, "read", noted_read)
    monkeypatch.setattr(engine_body, "pack", noted_pack)
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        assert (await client.ask(**fields))[0] == 200
    assert order == ["others", "pack"]


async def test_costly_bodies_of_a_tenant_wait_behind_the_first_one_of_another(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, take, order = 0, loop_steps.TenantTurns.take, list[str]()
    may_begin = asyncio.Event()
    line: loop_steps.TenantTurns | None = None
    """Where the first costly body waits; later steps of a call have turns of their own."""

    async def counted(self: loop_steps.TenantTurns, tenant: str) -> None:
        nonlocal waiting, line
        if line is None and self.at_once == 1:
            line = self
        is_costly = self is line
        waiting += is_costly
        await take(self, tenant)
        if is_costly and tenant == "first":
            await may_begin.wait()
        elif is_costly:
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


async def test_a_message_of_many_values_takes_the_turn_of_costly_ones_however_it_is_compressed(
    up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    turns, take_next = dict[str, loop_steps.TenantTurns](), loop_steps.TenantTurns.next

    async def noted(self: loop_steps.TenantTurns, tenant: str) -> None:
        turns[tenant] = self
        await take_next(self, tenant)

    monkeypatch.setattr(loop_steps.TenantTurns, "next", noted)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": MANY}}
    few, many, no_json = orjson.dumps(body), orjson.dumps(body | {"response_format": form}), b"[" * 3000
    compressions = {"identity": bytes, "gzip": gzip.compress, "deflate": zlib.compress}
    async with (
        fake_engine.engine() as engine,
        up(engine, listen={"grpcPort": 0}, store=False) as client,
        grpc_peer.connected(client.grpc) as peer,
    ):

        async def turn(encoding: str, body: bytes, path: str = "/v1/chat/completions") -> Any:
            """The turns in which the call waited for its own once its message was decoded; None for an ordinary call."""
            tenant = f"t{next(numbers)}"
            headers = [("grpc-encoding", encoding), ("x-tidegate-tenant", tenant)]
            raw = inference_pb2.CallRequest(path=path, body=body).SerializeToString()
            sent = grpc_peer.message(compressions[encoding](raw), compressed=encoding != "identity")
            answer = await peer.ended(peer.open("/tidegate.v1.Inference/Call", *headers, message=sent, ends=True))
            assert answer.head["grpc-status"] == ("0" if path else "3")
            return turns.get(tenant)

        costly = await turn("identity", many)
        assert costly is not None
        assert costly is not await turn("identity", few)
        for encoding in ("gzip", "deflate"):
            assert await turn(encoding, many) is costly
            assert await turn(encoding, few) is not costly
            assert await turn(encoding, no_json, path="") is costly, "thirty bytes on the wire"
