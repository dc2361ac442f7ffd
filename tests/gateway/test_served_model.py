"""Which model does a gateway serve whose settings name none? The one that most engines list."""

import asyncio
from typing import Any

import pytest

import fake_engine


def served(client: Any) -> Any:
    return client.state()["model"]


@pytest.mark.parametrize("place", range(3))
async def test_one_engine_of_three_does_not_name_the_model_of_the_pool(up: Any, until: Any, place: int) -> None:
    async with (
        fake_engine.engine() as one,
        fake_engine.engine() as two,
        fake_engine.engine(model="other") as wrong,
    ):
        engines = [one, two]
        engines.insert(place, wrong)
        async with up(*engines, seen=False) as client:
            await until(lambda: len(client.accepting()) == 2)
            assert served(client) == "fake"
            assert (await client.ask())[0] == 200
            assert (await client.ask(model="other"))[0] == 404
            reasons = {shown["name"]: shown["reason"] for shown in client.state()["engines"]}
            assert reasons[wrong.url.removeprefix("http://")] == "serves other, not fake"


async def test_an_engine_that_was_alone_at_the_start_gives_way_to_the_others(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(model="other") as wrong,
        fake_engine.engine(healthy=False) as one,
        fake_engine.engine(healthy=False) as two,
        up(wrong, one, two, seen=False) as client,
    ):
        await until(lambda: len(client.accepting()) == 1)
        assert served(client) == "other"
        one.healthy = two.healthy = True
        await until(lambda: len(client.accepting()) == 2)
        assert (await client.ask())[0] == 200


async def test_the_model_stays_while_an_engine_serves_it_and_most_engines_list_no_other(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine() as one,
        fake_engine.engine() as two,
        fake_engine.engine(model="other") as wrong,
        up(wrong, one, two, seen=False) as client,
    ):
        await until(lambda: len(client.accepting()) == 2)
        one.healthy = False
        await until(lambda: len(client.accepting()) == 1)
        await asyncio.sleep(0.3)
        assert served(client) == "fake"
        two.healthy = False
        await until(lambda: served(client) == "other")
        one.healthy = two.healthy = True
        await until(lambda: served(client) == "fake" and len(client.accepting()) == 2)


async def test_a_pool_whose_engines_are_replaced_one_by_one_goes_on_with_their_new_model(up: Any, until: Any) -> None:
    async with fake_engine.engine() as one, fake_engine.engine() as two, up(one, two) as client:
        for engine in (one, two):
            engine.healthy = False
            await until(lambda: len(client.accepting()) <= 1)
            engine.model, engine.healthy = "new", True
        await until(lambda: served(client) == "new" and client.all_accepting())
        assert (await client.ask(model="new"))[0] == 200


@pytest.mark.parametrize("adapters", [("fake", "sql"), ("sql", "fake")])
async def test_an_adapter_that_all_engines_list_is_not_the_model(up: Any, adapters: tuple[str, str]) -> None:
    async with (
        fake_engine.engine(model=adapters[0], adapters=adapters[1:]) as one,
        fake_engine.engine(adapters=("sql",)) as two,
        fake_engine.engine(adapters=("sql",)) as three,
        up(one, two, three) as client,
    ):
        assert served(client) == "fake"


async def test_an_engine_that_cannot_be_reached_does_not_delay_the_start(up: Any, until: Any) -> None:
    slow = {"interval": "60s"}  # nothing is checked twice, but for the news of the model
    down = {"url": "http://127.0.0.1:1"}
    async with (
        fake_engine.engine() as one,
        fake_engine.engine() as two,
        up(one, down, two, seen=False, health=slow) as client,
    ):
        await until(lambda: len(client.accepting()) == 2, 5.0)
