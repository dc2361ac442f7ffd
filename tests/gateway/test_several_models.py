"""One gateway in front of engines that serve different models."""

import asyncio
from typing import Any

import pytest

from tidegate_gateway import engine_entries, fake_engine


def entry(engine: fake_engine.FakeEngine, **fields: Any) -> dict[str, Any]:
    return {"url": engine.url, **fields}


@pytest.fixture
async def two(up: Any) -> Any:
    """A gateway with an engine of the model `fake` and one of the model `large`, and the engines."""
    async with (
        fake_engine.engine(context_tokens=1000) as small,
        fake_engine.engine(model="large", adapters=("sql",), context_tokens=100_000) as large,
        up(entry(small), entry(large, model="large"), model="fake") as client,
    ):
        yield client, small, large


async def test_each_call_goes_to_an_engine_of_its_model(two: Any) -> None:
    client, small, large = two
    asked = [client.ask(model=model) for model in ("fake", "large", "sql") for _ in range(4)]
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
    assert {body["model"] for body in small.bodies} == {"fake"}
    assert {body["model"] for body in large.bodies} == {"large", "sql"}
    async with client.http.get(f"{client.url}/v1/models") as response:
        assert {item["id"] for item in (await response.json())["data"]} == {"fake", "large", "sql"}
    assert (await client.ask(model="none"))[0] == 404


async def test_contexts_are_compared_among_engines_of_one_model(two: Any) -> None:
    client, small, large = two
    body = {"messages": [{"role": "user", "content": "x" * 40_000}]}
    status, answer, _ = await client.ask(model="fake", **body)
    assert status == 400, "no engine of this model has a longer context, so the engine's own answer stands"
    assert "context" in answer["error"]["message"]
    assert (await client.ask(model="large", **body))[0] == 200
    assert len(small.bodies) <= 1
    assert len(large.bodies) == 1


async def test_a_model_whose_engines_are_down_is_known_and_no_other_engine_gets_its_calls(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(healthy=False) as small,
        fake_engine.engine(model="large", healthy=False) as large,
        up(entry(small), entry(large, model="large"), model="fake", seen=False) as client,
    ):
        for model, engine, other in (("fake", small, large), ("large", large, small)):
            other.healthy, engine.healthy = True, False
            await until(lambda: len(client.accepting()) == 1 and client.accepting()[0] in other.url)  # noqa: B023
            status, answer, _ = await client.ask(model=model)
            assert (status, answer["error"]["code"]) == (503, "no-engines")
        assert not small.bodies
        assert not large.bodies


async def test_a_call_waits_for_room_at_the_engines_of_its_model_alone(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(first_s=60) as small,
        fake_engine.engine(model="large") as large,
        up(entry(small), entry(large, model="large"), model="fake", dispatch={"cap": 1}) as client,
        asyncio.TaskGroup() as calls,
    ):
        first = calls.create_task(client.ask())
        await until(lambda: small.running == 1)
        waiting = calls.create_task(client.ask())
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        assert (await client.ask(model="large"))[0] == 200
        assert len(large.bodies) == 1
        first.cancel()
        waiting.cancel()


async def test_an_engine_that_serves_another_model_than_its_entry_names_gets_no_calls(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine() as small,
        fake_engine.engine(model="wrong") as large,
        up(entry(small), entry(large, model="large", name="large-1"), model="fake", seen=False) as client,
    ):
        await until(lambda: len(client.accepting()) == 1)
        reasons = {shown["name"]: shown["reason"] for shown in client.state()["engines"]}
        assert reasons["large-1"] == "serves wrong, not large"


async def test_a_name_that_engines_of_two_models_list_belongs_to_one_of_them(up: Any) -> None:
    async with (
        fake_engine.engine(adapters=("sql",)) as small,
        fake_engine.engine(model="large", adapters=("fake", "sql"), context_tokens=10) as large,
        up(entry(small), entry(large, model="large"), model="fake") as client,
    ):
        asked = [client.ask(model=model) for model in ("fake", "sql", "large") for _ in range(6)]
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
        assert {body["model"] for body in small.bodies} == {"fake", "sql"}
        assert {body["model"] for body in large.bodies} == {"large"}
        models = {shown["name"]: shown["model"] for shown in client.state()["engines"]}
        assert sorted(models.values()) == ["fake", "large"]


def test_settings_with_several_models_name_each_of_them_once() -> None:
    engines = [engine_entries.StaticEngine(url="http://a:1"), engine_entries.StaticEngine(url="http://b:1", model="m")]
    assert engine_entries.problems("n", engines, []) == []
    (sentence,) = engine_entries.problems(None, engines, [])
    assert sentence.startswith("model must name")
    (sentence,) = engine_entries.problems("m", engines, [])
    assert sentence.startswith("engines[1].model must be another model")
