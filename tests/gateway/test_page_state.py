"""The state that the page and `tidegate top` show: whose calls it counts, and who may see it."""

import asyncio
import hashlib
import json
import pathlib
from typing import Any

import pytest
import yaml

import fake_engine
from tidegate_gateway.edge import state_snapshot
from tidegate_gateway.observe import policy_switches, recent_service

CLASSES = [{"name": "patient", "deadline": "10m"}, {"name": "hasty", "ttft": "1ms", "objective": 90}]


async def state(client: Any, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, found, _ = await client.send("GET", "/v1/state", headers=named)
    assert status == 200
    return found


async def test_the_state_counts_targets_by_class_and_by_tenant(up: Any) -> None:
    async with fake_engine.engine(tokens=3, first_s=0.2) as engine, up(engine, classes=CLASSES) as client:
        for name, tenant in (("patient", "acme"), ("hasty", "acme"), ("patient", "other")):
            headers = {"x-tidegate-class": name, "x-tidegate-tenant": tenant}
            async with client.openai() as api:
                ask = [{"role": "user", "content": "a secret prompt"}]
                stream = await api.chat.completions.create(
                    model="fake", messages=ask, stream=True, extra_headers=headers
                )
                async for _ in stream:
                    pass
        seen = await state(client)
        classes = {each["name"]: each for each in seen["classes"]}
        assert classes["patient"]["lately"]["met_ratio"] == classes["patient"]["budget_left"] == 1.0
        assert (classes["hasty"]["lately"]["late"], classes["hasty"]["since_start"]["late"]) == (1, 1)
        assert classes["hasty"]["budget_left"] == pytest.approx(1 - 1 / (1 - 0.9))
        assert state_snapshot.snapshot(client.gateway)["targets"] == {
            "patient": {"met": 2, "with_target": 2},
            "hasty": {"met": 0, "with_target": 1},
        }
        tenants = {each["name"]: each["lately"] for each in seen["tenants"]}
        assert (tenants["acme"]["answered"], tenants["acme"]["met_ratio"], tenants["other"]["tokens"]) == (2, 0.5, 3)
        assert sum(seen["throughput"]["answered"]) == 3
        assert "a secret prompt" not in json.dumps(seen)
        assert engine.url not in json.dumps(seen)


async def test_the_queue_is_counted_by_lane_class_and_tenant(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(tokens=1, first_s=0.5) as engine,
        up(engine, store=False, classes=CLASSES, dispatch={"cap": 1}, policy={"name": "two-lane"}) as client,
    ):
        headers = {"x-tidegate-class": "patient", "x-tidegate-tenant": "acme"}
        calls = [asyncio.create_task(client.ask(headers=headers, max_tokens=2)) for _ in range(4)]
        await until(lambda: client.gateway.core.dispatcher.waiting == 3)
        seen = await state(client)
        assert seen["queue"] == {"lanes": {"fast": 3}, "held": 0}
        assert {each["name"]: each["waiting"] for each in seen["classes"]}["patient"] == 3
        assert {each["name"]: each["waiting"] for each in seen["tenants"]}["acme"] == 3
        await asyncio.gather(*calls)


async def test_workflows_are_timelines_that_begin_with_the_workflow(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        headers = {"x-tidegate-workflow": "w", "x-tidegate-stage": "plan", "x-tidegate-deadline-ms": "20000"}
        await client.ask(headers=headers)
        await client.send("POST", "/v1/workflows/w/complete")
        (flow,) = (await state(client))["workflows"]["newest"]
        (stage,) = flow["stages"]
        assert (flow["id"], flow["outcome"], flow["deadline_ms"]) == ("w", "met", 20000)
        assert 0 <= stage["start_ms"] <= stage["start_ms"] + stage["time_ms"] <= flow["elapsed_ms"]
        assert flow["elapsed_ms"] + flow["left_ms"] == 20000


async def test_without_a_store_the_state_has_no_workflows(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        assert (await state(client))["workflows"]["newest"] is None


async def test_a_tenant_sees_its_own_calls_and_nothing_of_others(up: Any, tmp_path: pathlib.Path) -> None:
    keys = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant}
        for key, tenant in (("acme-0123456789", "acme"), ("all-0123456789", "*"))
    ]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": keys}))
    async with fake_engine.engine() as engine, up(engine, auth={"keysFile": str(path)}) as client:
        for tenant in ("acme", "rival"):
            headers = {"authorization": "Bearer all-0123456789", "x-tidegate-tenant": tenant}
            await client.ask(
                headers={**headers, "x-tidegate-workflow": f"of-{tenant}", "x-tidegate-deadline-ms": "20000"}
                | {"x-tidegate-stage": "s"}
            )
        await client.gateway.policy.choose("steered", "edf", reason="misses: of tenant rival", for_s=None)
        own = await state(client, authorization="Bearer acme-0123456789")
        assert own["scope"] == {"tenant": "acme"}
        assert [each["name"] for each in own["tenants"]] == ["acme"]
        assert [each["id"] for each in own["workflows"]["newest"]] == ["of-acme"]
        assert "rival" not in json.dumps(own)
        assert not own.keys() & {"engines", "classes", "queue", "throughput"}
        whole = await state(client, authorization="Bearer all-0123456789")
        assert {each["name"] for each in whole["tenants"]} == {"acme", "rival"}
        for path_ in ("/", "/page.css", "/page.js", "/page_dom.js", "/page_request.js"):
            async with client.http.get(client.url + path_) as response:
                assert response.status == 200
                assert "'unsafe-inline'" not in response.headers["content-security-policy"]


async def test_many_pages_at_once_cost_one_state(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        states = await asyncio.gather(*(state(client) for _ in range(20)))
        assert len({each["at"] for each in states}) < 20


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def switches(clock: Clock, service: recent_service.RecentService) -> policy_switches.PolicySwitches:
    return policy_switches.PolicySwitches(service, clock=clock, wall=lambda: 1_700_000_000.0, waiting=lambda: 2)


def add(
    service: recent_service.RecentService, at_s: float, outcome: recent_service.Outcome, answer_s: float = 1.0
) -> None:
    service.add(at_s, "chat", "acme", tokens=1, answer_s=answer_s, outcome=outcome)


def test_a_switch_has_the_service_before_it_as_evidence_and_after_it_as_effect() -> None:
    clock, service = Clock(), recent_service.RecentService()
    seen = switches(clock, service)
    clock.now += 100.0
    for outcome in (*["late"] * 3, "met"):
        add(service, clock.now - 1, outcome, 8.0)
    seen.on_switch("urgency", "sjf", source="steered", reason="overload: x")
    add(service, clock.now + 1, "met", 2.0)
    clock.now += 30.0
    (shown,) = seen.as_json()
    assert shown["evidence"] == "25% of 4 targets met, answers took 8 s, 2 calls waited"
    assert shown["effect"] == "100% of 1 targets met, answers took 2 s, 2 calls waited (first 30 s)"
    assert (shown["from"], shown["to"], shown["source"], shown["reason"]) == (
        "urgency",
        "sjf",
        "steered",
        "overload: x",
    )
    assert shown["at"] == "2023-11-14T22:12:50Z"


def test_the_effect_of_a_switch_ends_with_the_next_one_and_after_a_minute() -> None:
    clock, service = Clock(), recent_service.RecentService()
    seen = switches(clock, service)
    seen.on_switch("urgency", "sjf", source="steered", reason="a")
    clock.now += 10.0
    add(service, clock.now - 1, "met")
    seen.on_switch("sjf", "edf", source="override", reason="b")
    add(service, clock.now, "late")
    clock.now += 61.0
    seen.settle()
    add(service, clock.now, "late")
    clock.now += 4000.0
    add(service, clock.now, "late")
    last, first = seen.as_json()
    assert (first["after"]["seconds"], first["after"]["with_target"]) == (10.0, 1)
    assert (last["after"]["seconds"], last["after"]["with_target"], last["before"]["with_target"]) == (60.0, 1, 1)
    assert "first" not in last["effect"]


def test_only_the_last_switches_are_remembered() -> None:
    clock = Clock()
    seen = switches(clock, recent_service.RecentService())
    for _ in range(policy_switches.REMEMBERED + 5):
        clock.now += 1.0
        seen.on_switch("a", "b", source="steered", reason="x")
    assert len(seen.as_json()) == policy_switches.REMEMBERED


def test_tallies_are_forgotten_after_their_time_and_series_keep_their_order() -> None:
    service = recent_service.RecentService()
    for at_s in (1000.0, 1002.0, 1010.0, 1299.0):
        add(service, at_s, "met")
    series = [step.calls for step in service.series(1299.0)]
    assert (len(series), series[0], series[2], series[-1]) == (60, 2, 1, 1)
    add(service, 2000.0, "late")
    assert service.by_class(2000.0)["chat"].with_target == 1
    assert service.since_start()["chat"].with_target == 5
