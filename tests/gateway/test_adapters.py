"""Calls for an adapter go to the engines that have it."""

import asyncio
from typing import Any

import pytest

import fake_engine
from tidegate_gateway.engines import health_check
from tidegate_policy.model import EngineId


async def test_calls_for_an_adapter_go_to_the_engines_that_list_it(up: Any) -> None:
    async with (
        fake_engine.engine(adapters=("sql",)) as with_it,
        fake_engine.engine() as without,
        up(with_it, without) as client,
    ):
        async with client.http.get(f"{client.url}/v1/models") as response:
            assert {item["id"] for item in (await response.json())["data"]} == {"fake", "sql"}
        bodies = {"/v1/chat/completions": {}, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
        for path, fields in bodies.items():
            answers = [client.ask(path, model="sql", **fields) for _ in range(4)]
            assert {status for status, _, _ in await asyncio.gather(*answers)} == {200}
        assert {body["model"] for body in with_it.bodies} == {"sql"}
        assert not without.bodies
        answers = [client.ask(headers={"x-session-id": str(i)}) for i in range(16)]
        assert {status for status, _, _ in await asyncio.gather(*answers)} == {200}
        assert without.bodies, "calls for the base model go to all engines"


async def test_a_call_that_waits_for_an_adapter_takes_an_engine_that_has_loaded_it_meanwhile(
    up: Any, until: Any
) -> None:
    async with (
        fake_engine.engine(adapters=("sql",), first_s=60) as busy,
        fake_engine.engine() as other,
        up(busy, other, dispatch={"cap": 1}) as client,
        asyncio.TaskGroup() as calls,
    ):
        first = calls.create_task(client.ask(model="sql"))
        await until(lambda: busy.running == 1)
        waiting = calls.create_task(client.ask(model="sql"))
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        other.adapters = ("sql",)
        status, answer, _ = await waiting
        assert (status, answer["model"]) == (200, "sql")
        assert [body["model"] for body in other.bodies] == ["sql"]
        first.cancel()


async def test_an_adapter_whose_only_engine_fails_is_a_clear_error(up: Any) -> None:
    async with (
        fake_engine.engine(adapters=("sql",), status=500) as failing,
        fake_engine.engine() as other,
        up(failing, other) as client,
    ):
        status, error, _ = await client.ask(model="sql")
        assert (status, error["error"]["code"]) in {(502, "engine_failed"), (503, "no-engines")}
        assert not other.bodies
        assert (await client.ask())[0] == 200


@pytest.mark.parametrize("model", ["sql", "fake"])
async def test_rows_of_a_relquery_go_where_their_model_is(up: Any, model: str) -> None:
    async with (
        fake_engine.engine(adapters=("sql",)) as with_it,
        fake_engine.engine() as without,
        up(with_it, without) as client,
    ):
        body = {"model": model, "template": "Say {{a}}.", "rows": [{"a": str(i)} for i in range(12)], "stream": False}
        status, created, _ = await client.send("POST", "/v1/relqueries", json=body)
        assert status == 201
        url = f"{client.url}/v1/relqueries/{created['id']}/rows"
        async with client.http.get(url) as response:
            assert b'"completed"' in await response.read()
        assert len(with_it.bodies) + len(without.bodies) == 12
        assert model == "fake" or not without.bodies


async def test_an_engine_that_lists_very_many_models_is_believed_for_the_first_ones(up: Any) -> None:
    names = tuple(f"adapter-{i}" for i in range(20_000))
    async with fake_engine.engine(adapters=names) as engine, up(engine) as client:
        assert len(client.gateway.directory.models) == health_check.MOST_MODELS
        assert (await client.ask(model="adapter-0"))[0] == 200
        assert (await client.ask(model="adapter-19999"))[0] == 404


async def test_a_call_that_waits_for_an_adapter_goes_to_no_engine_that_comes_without_it(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(adapters=("sql",), first_s=0.5) as busy,
        fake_engine.engine(adapters=("sql",)) as later,
        up(busy, later, dispatch={"cap": 1}) as client,
    ):
        ids = [EngineId(engine.url.removeprefix("http://")) for engine in (busy, later)]
        later.adapters = ()
        await until(lambda: ids[1] not in client.gateway.directory.candidates("sql", 1))
        later.healthy = False
        await until(lambda: client.accepting() == ids[:1])
        waiting = [asyncio.create_task(client.ask(model="sql")) for _ in range(3)]
        await until(lambda: client.gateway.core.dispatcher.waiting == 2)
        later.healthy = True
        assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}
        assert len(busy.bodies) == 3
        assert not later.bodies


async def test_calls_that_wait_go_on_after_a_list_of_models_was_unreadable(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(adapters=("sql",), first_s=1.5) as only,
        fake_engine.engine() as other,
        up(only, other, dispatch={"cap": 1}) as client,
    ):
        waiting = [asyncio.create_task(client.ask(model="sql")) for _ in range(2)]
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        only.adapters = ()
        await until(lambda: "sql" not in client.gateway.directory.models)
        only.adapters = ("sql",)
        await until(lambda: "sql" in client.gateway.directory.models)
        assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}
        assert not other.bodies


async def test_an_engine_that_lists_an_adapter_first_makes_no_model_of_it(up: Any) -> None:
    async with (
        fake_engine.engine(adapters=("sql",)) as with_it,
        fake_engine.engine() as without,
        fake_engine.engine(model="sql", adapters=("fake",)) as reversed_list,
        up(with_it, without, reversed_list) as client,
    ):
        answers = [client.ask(model="sql", headers={"x-session-id": str(i)}) for i in range(16)]
        assert {status for status, _, _ in await asyncio.gather(*answers)} == {200}
        assert not without.bodies
