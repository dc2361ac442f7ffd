"""The admin port: state for people, and one truth about the policy for all gateways."""

import asyncio
from typing import Any

import pytest

import fake_engine
from tidegate_control import control_contract, control_server
from tidegate_gateway.edge import http_api
from tidegate_gateway.engines import metrics_scrape
from tidegate_gateway.observe import prometheus_metrics
from tidegate_gateway.store import store_contract


async def put(client: Any, body: Any) -> tuple[int, Any]:
    async with client.http.put(client.admin_url + "/admin/policy", json=body) as response:
        return response.status, await response.json()


async def test_an_override_reaches_every_gateway_and_lapses(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, pool="shared-a") as one, up(engine, pool="shared-a") as two:
        status, answer = await put(one, {"policy": "edf", "for_s": 0.6, "reason": "trying"})
        assert (status, answer["name"], answer["source"], answer["reason"]) == (200, "edf", "override", "trying")
        await until(lambda: two.gateway.core.dispatcher.policy == "edf")
        await until(lambda: two.gateway.core.dispatcher.policy == one.gateway.core.dispatcher.policy == "urgency")


async def test_a_policy_that_was_in_force_before_a_gateway_started_is_no_switch(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, pool="joined") as one:
        await put(one, {"policy": "edf"})
        async with up(engine, pool="joined") as two:
            await until(lambda: two.gateway.core.dispatcher.policy == "edf")
            assert (two.gateway.policy.active.source, two.gateway.policy.switches.as_json()) == ("override", [])
            await put(one, {"policy": "sjf"})
            await until(lambda: two.gateway.core.dispatcher.policy == "sjf")
            assert [each["to"] for each in two.gateway.policy.switches.as_json()] == ["sjf"]


async def test_calls_that_wait_at_engines_count_as_waiting_at_a_switch(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for known in client.gateway.discovery.known.values():
            known.load = metrics_scrape.Load(waiting=7)
        answer = (await put(client, {"policy": "edf"}))[1]
        assert answer["switches"][0]["before"]["waiting"] == 7


async def test_an_exchange_with_the_store_that_began_before_an_override_does_not_undo_it(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        gateway = client.gateway
        choices = gateway.policy.choices
        before = await gateway.link.store.exchange({})
        assert (await put(client, {"policy": "edf"}))[0] == 200
        gateway.policy.follow(before, choices=choices)
        assert gateway.policy.active.name == gateway.core.dispatcher.policy == "edf"
        gateway.policy.follow(before, choices=gateway.policy.choices)
        assert gateway.policy.active.name == "urgency", "a later exchange counts"


async def test_an_override_outranks_steering_and_can_be_taken_back(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        steered = {
            "policy": "two-lane",
            "source": "steered",
            "reason": "long calls",
            "alternatives": ["sjf", "edf"],
            "expected": "short calls wait less",
        }
        chosen = (await put(client, steered))[1]
        assert (chosen["name"], chosen["alternatives"], chosen["expected"]) == (
            "two-lane",
            ["sjf", "edf"],
            "short calls wait less",
        )
        assert (await put(client, {"policy": "fcfs"}))[1]["name"] == "fcfs"
        assert (await put(client, {"policy": "sjf", "source": "steered"}))[1]["name"] == "fcfs"
        active = (await put(client, {"policy": None}))[1]
        assert {key: active[key] for key in ("name", "source", "reason", "left_s")} == {
            "name": "sjf",
            "source": "steered",
            "reason": "no reason given",
            "left_s": None,
        }
        switches = [(each["from"], each["to"], each["source"]) for each in active["switches"]]
        assert switches == [
            ("fcfs", "sjf", "steered"),
            ("two-lane", "fcfs", "override"),
            ("urgency", "two-lane", "steered"),
        ]
        assert active["switches"][-1]["reason"] == "long calls"
        explained = [(each["alternatives"], each["expected"]) for each in active["switches"]]
        assert explained == [([], ""), ([], ""), (["sjf", "edf"], "short calls wait less")]
        counted = client.gateway.metrics.registry.get_sample_value
        labels = {"from": "urgency", "to": "two-lane", "reason": "steered"}
        assert counted("tidegate_policy_switches_total", labels) == 1.0


@pytest.mark.parametrize("source", ["override", "steered"])
async def test_without_a_store_a_choice_lives_here_and_lapses(up: Any, until: Any, source: str) -> None:
    async with up(store=False) as client:
        await put(client, {"policy": "edf", "for_s": 0.3, "source": source})
        assert client.gateway.core.dispatcher.policy == "edf"
        await until(lambda: (client.gateway.policy.active.left_s or 0) < 0.25)
        await until(lambda: client.gateway.core.dispatcher.policy == "urgency")


async def test_an_override_that_does_not_say_holds_for_ten_minutes(up: Any) -> None:
    async with up(store=False) as client:
        await put(client, {"policy": "edf"})
        chosen = await client.gateway.policy.choose("override", "edf", reason="", for_s=None)
        assert 590 < chosen.left_s <= 600


async def test_the_page_and_the_metrics_can_be_taken_off_the_client_port(up: Any) -> None:
    for listen, status in (({}, 200), ({"statusPage": False, "clientMetrics": False}, 404)):
        async with up(store=False, listen=listen) as client:
            for path in ("/", "/metrics"):
                async with client.http.get(client.url + path) as response:
                    assert response.status == status
                async with client.http.get(client.admin_url + path) as response:
                    assert response.status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"policy": "magic"},
        {"policy": 5},
        {"policy": "edf", "for_s": -1},
        {"policy": "edf", "for_s": 10**9},
        {"policy": "edf", "for_s": "10m"},
        {"policy": "edf", "surprise": 1},
        {"policy": "edf", "source": "me"},
        [],
    ],
)
async def test_a_wrong_choice_of_policy_is_a_bad_request(up: Any, body: Any) -> None:
    async with up(store=False) as client:
        status, answer = await put(client, body)
        assert status == 400
        assert answer["error"]["message"]
        assert client.gateway.core.dispatcher.policy == "urgency"


async def test_the_state_shows_engines_and_decisions_but_no_prompts(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        await client.ask("/v1/completions", prompt="a-secret-prompt")
        async with client.http.get(client.admin_url + "/admin/state") as response:
            text, state = await response.text(), await response.json()
        assert state["status"] == "ready"
        assert [shown["accepting"] for shown in state["engines"]] == [True]
        assert state["recent"][0]["engine"] == state["engines"][0]["name"]
        assert {"service_s", "shared_s", "slack_s"} <= set(state["recent"][0])
        assert "a-secret-prompt" not in text


async def test_the_admin_port_has_no_client_api_and_the_client_port_no_admin(up: Any) -> None:
    async with up(store=False) as client:
        async with client.http.get(client.admin_url + "/v1/models") as response:
            assert response.status == 404
        async with client.http.put(client.url + "/admin/policy", json={"policy": "fcfs"}) as response:
            assert response.status == 404


TOKEN = "a-token-of-the-pool"


async def test_an_admin_port_beyond_loopback_requires_the_token_of_the_pool(up: Any) -> None:
    listen, auth = {"adminHost": "0.0.0.0"}, {"poolToken": TOKEN}
    async with up(store=False, listen=listen, auth=auth) as client:
        url = client.admin_url.replace("0.0.0.0", "127.0.0.1")
        for sent in ({}, {"authorization": "Bearer another-token-than-that"}, {"authorization": TOKEN}):
            for path in ("/admin/state", "/admin/policy", "/metrics", "/v1/state"):
                async with client.http.get(url + path, headers=sent) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
            async with client.http.put(url + "/admin/policy", json={"policy": "edf"}, headers=sent) as response:
                assert response.status == 401
        assert client.gateway.core.dispatcher.policy == "urgency"
        right = {"authorization": f"Bearer {TOKEN}"}
        async with client.http.put(url + "/admin/policy", json={"policy": "edf"}, headers=right) as response:
            assert response.status == 200
        async with client.http.get(url + "/v1/state", headers=right) as response:
            assert response.status == 200
        async with client.http.get(url + "/page.js") as response:  # the page asks for the token
            assert response.status == 200


async def test_an_admin_port_on_loopback_requires_no_token(up: Any) -> None:
    async with (
        up(store=False, auth={"poolToken": TOKEN}) as client,
        client.http.get(client.admin_url + "/admin/state") as response,
    ):
        assert response.status == 200


async def test_an_engine_that_rejects_the_token_serves_calls_and_is_named_once_in_the_log(
    up: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As during a roll-out, in which an older gateway has no token yet."""
    address = "unix:@tidegate-gateway-token-test"
    stop = control_server.serve(
        control_contract.Fallback("no hook", policy="priority"), address=address, engine_version="1", token=TOKEN
    ).stop
    try:
        async with (
            fake_engine.engine() as engine,
            up({"url": engine.url, "name": "one", "control": address}, store=False) as client,
        ):
            known = client.gateway.discovery.known
            await until(lambda: all(health.rejects_token for health in known.values()))
            assert (await client.ask())[0] == 200
            await until(lambda: caplog.text.count("requires the token of the pool") == 1)
        async with (
            fake_engine.engine() as engine,
            up(
                {"url": engine.url, "name": "one", "control": address}, store=False, auth={"poolToken": TOKEN}
            ) as client,
        ):
            known = client.gateway.discovery.known
            await until(lambda: all(health.policy == "priority" for health in known.values()))
    finally:
        stop()


async def test_requests_for_metrics_at_the_same_time_share_one_text(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    exposition = prometheus_metrics.Metrics.exposition

    def counted(self: prometheus_metrics.Metrics, accept: str = "") -> tuple[bytes, str]:
        nonlocal made
        made += 1
        return exposition(self, accept)

    monkeypatch.setattr(prometheus_metrics.Metrics, "exposition", counted)
    monkeypatch.setattr(http_api, "TEXTS_PER_S", 1.0)
    async with up(store=False) as client:

        async def scrape(accept: str) -> str:
            async with client.http.get(f"{client.url}/metrics", headers={"accept": accept}) as response:
                return response.headers["content-type"].partition(";")[0] + str(response.status)

        kinds = ["text/plain", "application/openmetrics-text; version=1.0.0", "a/b", "c/d"]
        found = await asyncio.gather(*(scrape(kinds[i % 4]) for i in range(200)))
        assert set(found) == {"text/plain200", "application/openmetrics-text200"}
        assert made < 100
        assert (await scrape("")).endswith("200")


async def test_a_choice_lapses_while_the_store_is_down(up: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise store_contract.Unavailable("gone")

    async with up() as client:
        await put(client, {"policy": "edf", "for_s": 1.5})
        assert client.gateway.core.dispatcher.policy == "edf"
        monkeypatch.setattr(client.gateway.link.store, "exchange", fails)
        await until(lambda: client.gateway.core.dispatcher.policy == "urgency")
        assert not client.gateway.link.up
