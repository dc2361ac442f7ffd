"""Classes, tenants and templates of a changed settings file, without a restart."""

import asyncio

import pytest
import yaml

import fake_engine
from tidegate_gateway import settings_decoder, settings_reload


@pytest.fixture
async def engine():
    async with fake_engine.engine() as running:
        yield running


def write(path, **document):
    path.write_text(yaml.safe_dump(document))


async def test_a_changed_file_takes_effect_while_a_call_runs(up, engine, until, tmp_path):
    path = tmp_path / "gateway.yaml"
    async with up(engine, classes=[{"name": "old"}]) as client:
        reload = settings_reload.SettingsReload(path, client.gateway, environment={})
        write(path, classes=[{"name": "old"}])
        await reload.reload()
        engine.first_s = 0.5
        stream = asyncio.create_task(client.ask(headers={"x-tidegate-class": "old"}))
        await until(lambda: engine.running == 1)
        assert (await client.ask(headers={"x-tidegate-class": "new"}))[0] == 400
        write(
            path,
            classes=[{"name": "new", "ttft": "1s"}],
            defaultClass="new",
            tenants=[{"name": "search", "weight": 3}],
            workflows=[{"name": "report", "deadline": "60s", "stages": [{"name": "plan"}]}],
        )
        await reload.reload()
        assert engine.running == 1
        assert (await stream)[0] == 200
        assert (await client.ask(headers={"x-tidegate-class": "new"}))[0] == 200
        assert (await client.ask(headers={"x-tidegate-class": "old"}))[0] == 400
        status, answer, _ = await client.send("POST", "/v1/workflows", json={"template": "report"})
        assert (status, answer["template"]) == (201, "report")


async def test_a_changed_parameter_of_a_policy_counts_at_once(up, engine, tmp_path):
    path = tmp_path / "gateway.yaml"

    def threshold(value):
        return {"parameters": [{"policy": "two-lane", "name": "threshold_s", "value": value}]}

    async with up(engine, policy={"name": "two-lane"} | threshold(6)) as client:
        dispatcher = client.gateway.core.dispatcher
        assert dispatcher.policy_parameters["threshold_s"] == 6.0
        reload = settings_reload.SettingsReload(path, client.gateway, environment={})
        write(path, policy={"name": "two-lane"} | threshold(9))
        await reload.reload()
        assert dispatcher.policy_parameters["threshold_s"] == 9.0
        write(path, policy={"name": "edf"} | threshold(9))
        await reload.reload()
        assert (dispatcher.policy, client.gateway.policy.active.source) == ("edf", "settings")
        await client.gateway.policy.choose("override", "two-lane", reason="a test", for_s=60)
        assert dispatcher.policy_parameters["threshold_s"] == 9.0


async def test_a_file_that_cannot_be_used_changes_nothing(up, engine, tmp_path):
    path = tmp_path / "gateway.yaml"
    async with up(engine, classes=[{"name": "old"}]) as client:
        reload = settings_reload.SettingsReload(path, client.gateway, environment={})
        write(path, classes=[{"name": "new", "weight": 0}])
        with pytest.raises(settings_decoder.BadSettings, match=r"classes\[new\].weight"):
            await reload.reload()
        assert (await client.ask(headers={"x-tidegate-class": "old"}))[0] == 200


async def test_settings_that_need_a_restart_are_named_when_the_file_changes_them(up, engine, tmp_path, caplog):
    path = tmp_path / "gateway.yaml"
    async with up(engine, limits={"connections": 10}) as client:  # as if the open files of the process had bounded them
        reload = settings_reload.SettingsReload(path, client.gateway, environment={})
        caplog.clear()  # of what the gateway says at its start
        write(path, limits={"connections": 10_000})
        await reload.reload()
        assert not caplog.messages
        write(path, limits={"connections": 20_000})
        await reload.reload()
        assert caplog.messages == ["the settings file has changed; limits take effect at the next start"]
