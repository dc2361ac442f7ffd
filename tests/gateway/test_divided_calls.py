"""A gateway divides its calls among two revisions of the engines as the operator says, and counts how each one serves."""

import asyncio
from typing import Any

import pytest

import fake_engine


async def divide(client: Any, body: Any) -> tuple[int, Any]:
    async with client.http.put(client.admin_url + "/admin/rollout", json=body) as response:
        return response.status, await response.json()


def pair(old: fake_engine.FakeEngine, new: fake_engine.FakeEngine) -> tuple[dict[str, str], dict[str, str]]:
    return {"url": old.url, "name": "old"}, {"url": new.url, "name": "new"}


def service(client: Any) -> dict[str, Any]:
    return {engine["name"]: engine["service"] for engine in client.state()["engines"]}


async def test_the_new_engine_gets_its_share_of_the_calls_until_the_division_ends(up: Any) -> None:
    async with (
        fake_engine.engine() as old,
        fake_engine.engine() as new,
        up(*pair(old, new), dispatch={"cap": 10}) as client,
    ):
        status, answer = await divide(client, {"engines": ["new"], "weight": 0, "for_s": 60})
        assert status == 200
        assert (answer["rollout"]["engines"], answer["rollout"]["weight"]) == (["new"], 0)
        for _ in range(20):
            assert (await client.ask())[0] == 200
        assert (old.served, new.served) == (20, 0)
        await divide(client, {"engines": ["new"], "weight": 100})
        for _ in range(20):
            assert (await client.ask())[0] == 200
        assert (old.served, new.served) == (20, 20)
        assert (await divide(client, {"weight": None}))[1] == {"rollout": None}
        old.first_s = new.first_s = 0.5  # more calls at a time than one engine takes, however fast it seems
        await asyncio.gather(*(client.ask() for _ in range(20)))
        assert old.served > 20


async def test_a_new_engine_that_fails_costs_no_client_its_answer_and_its_errors_are_counted(up: Any) -> None:
    async with fake_engine.engine() as old, fake_engine.engine(status=500) as new, up(*pair(old, new)) as client:
        await divide(client, {"engines": ["new"], "weight": 100})
        for _ in range(10):
            assert (await client.ask())[0] == 200
        seen = service(client)
        assert seen["new"]["errors"] == seen["new"]["calls"] > 0
        assert (seen["old"]["errors"], seen["old"]["calls"]) == (0, 10)


async def test_times_and_targets_are_counted_for_each_engine(up: Any) -> None:
    classes = {"classes": [{"name": "chat", "ttft": "100ms"}], "defaultClass": "chat"}
    async with (
        fake_engine.engine(token_s=0.01) as old,
        fake_engine.engine(token_s=0.01, first_s=0.3) as new,
        up(*pair(old, new), **classes) as client,
    ):
        await client.ask(stream=False)
        assert service(client)["old"]["calls"] == 0, "nothing is counted before the first division"
        for name, weight in (("old", 0), ("new", 100)):
            await divide(client, {"engines": ["new"], "weight": weight})
            for _ in range(2):
                body = {"model": "fake", "prompt": "hello", "max_tokens": 4, "stream": True}
                async with client.http.post(client.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
            assert (await client.ask())[0] == 200
            seen = service(client)[name]
            assert (seen["calls"], seen["ttft"]["count"], seen["tpot"]["count"]) == (3, 2, 3)
            assert seen["targets"]["chat"]["with_target"] >= 2
        seen = service(client)
        assert seen["new"]["ttft"]["log_sum"] > seen["old"]["ttft"]["log_sum"]
        assert seen["new"]["targets"]["chat"]["missed"] >= 2


async def test_calls_that_the_engine_rejects_are_errors_of_the_engine(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up({"url": engine.url, "name": "new"}) as client:
        await divide(client, {"engines": ["new"], "weight": 50})
        assert (await client.ask())[0] == 400
        assert (service(client)["new"]["calls"], service(client)["new"]["errors"]) == (1, 1)


@pytest.mark.parametrize(
    "body",
    [
        {"weight": 101},
        {"weight": True},
        {"weight": 5, "engines": "new"},
        {"weight": 5, "engines": [1]},
        {"weight": 5, "for_s": 0},
        {"weight": 5, "for_s": "5m"},
        {"weight": 5, "surprise": 1},
        [],
    ],
)
async def test_a_wrong_division_is_a_bad_request(up: Any, body: Any) -> None:
    async with up(store=False) as client:
        status, answer = await divide(client, body)
        assert status == 400
        assert answer["error"]["message"]
        assert client.state()["rollout"] is None


async def test_a_client_that_makes_up_classes_makes_few_counts(up: Any) -> None:
    async with fake_engine.engine() as old, fake_engine.engine() as new, up(*pair(old, new)) as client:
        await divide(client, {"engines": ["new"], "weight": 0})
        for number in range(200):
            body = {"model": "fake", "prompt": "x", "max_tokens": 1}
            headers = {"x-tidegate-class": f"made-up-{number}", "x-tidegate-deadline-ms": "60000"}
            async with client.http.post(client.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
        assert 1 <= len(service(client)["old"]["targets"]) <= 110, "200 names were sent"
