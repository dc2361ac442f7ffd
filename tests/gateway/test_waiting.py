"""Where a call waits and who goes next: caps, late binding, orders, policy switches, refusals."""

import asyncio
import dataclasses
from typing import Any

import pytest

import fake_engine
from tidegate_gateway.observe import prometheus_metrics


class Line:
    """Calls that wait in the gateway behind one that holds the only place."""

    def __init__(self, client: Any, engine: fake_engine.FakeEngine, group: asyncio.TaskGroup, until: Any) -> None:
        self.client, self.engine, self.group, self.until = client, engine, group, until
        self.calls: list[asyncio.Task[Any]] = []

    async def hold(self) -> None:
        self.engine.first_s = 3600
        self.holder = self.group.create_task(self.client.ask())
        await self.until(lambda: self.engine.running == 1)

    async def join(self, name: str, **headers: str) -> None:
        waiting = self.client.gateway.core.dispatcher.waiting
        call = self.client.ask(headers={"x-session-id": name, **headers})
        self.calls.append(self.group.create_task(call))
        await self.until(lambda: self.client.gateway.core.dispatcher.waiting == waiting + 1)

    async def release(self) -> list[str]:
        """Names in the order in which the engine saw them."""
        self.engine.first_s = 0
        self.holder.cancel()
        for call in self.calls:
            assert (await call)[0] == 200
        return [body["vllm_xargs"]["tg.session"] for body in self.engine.bodies[1:]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", ["late", "none", "soon"]), ("edf", ["soon", "late", "none"]), ("urgency", ["soon", "late", "none"])],
)
async def test_calls_above_max_inflight_wait_in_the_order_of_the_policy(
    up: Any, until: Any, policy: str, expected: list[str]
) -> None:
    settings = {"dispatch": {"cap": 1}, "policy": {"name": policy}}
    async with fake_engine.engine() as engine, up(engine, **settings) as client, asyncio.TaskGroup() as group:
        line = Line(client, engine, group, until)
        await line.hold()
        await line.join("late", **{"x-tidegate-deadline-ms": "500000"})
        await line.join("none")
        await line.join("soon", **{"x-tidegate-deadline-ms": "100000"})
        assert await line.release() == expected


async def test_a_policy_switch_orders_waiting_calls_anew_and_loses_none(up: Any, until: Any) -> None:
    settings = {"dispatch": {"cap": 1}, "policy": {"name": "fcfs"}}
    async with fake_engine.engine() as engine, up(engine, **settings) as client, asyncio.TaskGroup() as group:
        line = Line(client, engine, group, until)
        await line.hold()
        for i in range(6):
            await line.join(f"s{i}", **{"x-tidegate-deadline-ms": str(500_000 - i * 10_000)})
        async with client.http.put(client.admin_url + "/admin/policy", json={"policy": "edf", "for_s": 60}) as response:
            assert response.status == 200
        assert await line.release() == [f"s{i}" for i in reversed(range(6))]


async def test_a_call_binds_late_to_whichever_engine_has_room(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(first_s=3600) as stuck,
        fake_engine.engine(first_s=3600) as freed,
        up(stuck, freed, dispatch={"cap": 1}) as client,
        asyncio.TaskGroup() as group,
    ):
        holders = {name: group.create_task(client.ask(headers={"x-session-id": name})) for name in ("h1", "h2")}
        await until(lambda: stuck.running == freed.running == 1)
        waits = group.create_task(client.ask())
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        freed.first_s = 0
        holders[freed.bodies[0]["vllm_xargs"]["tg.session"]].cancel()
        assert (await waits)[0] == 200
        assert freed.served == 1
        holders[stuck.bodies[0]["vllm_xargs"]["tg.session"]].cancel()


async def test_no_bound_on_inflight_calls_is_early_binding(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(first_s=3600) as engine,
        up(engine, dispatch={"cap": None}) as client,
        asyncio.TaskGroup() as group,
    ):
        calls = [group.create_task(client.ask()) for _ in range(200)]
        await until(lambda: engine.running == 200)
        assert client.gateway.core.dispatcher.waiting == 0
        for call in calls:
            call.cancel()


async def test_a_full_queue_sheds_as_saturated(up: Any, until: Any) -> None:
    settings = {"dispatch": {"cap": 1}, "queue": {"maxRequests": 1}}
    async with fake_engine.engine() as engine, up(engine, **settings) as client, asyncio.TaskGroup() as group:
        line = Line(client, engine, group, until)
        await line.hold()
        await line.join("waits")
        status, answer, headers = await client.ask()
        assert (status, answer["error"]["code"], headers["x-tidegate-reason"]) == (429, "saturated", "saturated")
        assert int(headers["retry-after"]) >= 1
        await line.release()


async def test_sheddable_classes_are_shed_first(up: Any, until: Any) -> None:
    classes = [{"name": "batch", "sheddable": True}]
    settings = {"dispatch": {"cap": 1}, "queue": {"maxRequests": 2}, "classes": classes}
    async with fake_engine.engine() as engine, up(engine, **settings) as client, asyncio.TaskGroup() as group:
        line = Line(client, engine, group, until)
        await line.hold()
        await line.join("waits")
        assert (await client.ask(headers={"x-tidegate-class": "batch"}))[0] == 429
        await line.join("also waits")
        await line.release()


async def test_waiting_too_long_and_too_late_have_their_reasons(up: Any, until: Any) -> None:
    settings = {"dispatch": {"cap": 1}, "queue": {"ttl": "300ms"}}
    async with fake_engine.engine() as engine, up(engine, **settings) as client, asyncio.TaskGroup() as group:
        line = Line(client, engine, group, until)
        await line.hold()
        late = group.create_task(client.ask(headers={"x-tidegate-deadline-ms": "50"}))
        expired = group.create_task(client.ask())
        assert (await late)[2]["x-tidegate-reason"] == "deadline-unreachable"
        assert (await expired)[2]["x-tidegate-reason"] == "ttl-expired"
        line.holder.cancel()


async def test_tokens_a_minute_are_counted_over_all_gateways(up: Any) -> None:
    tenants = [{"name": "small", "tokensPerMinute": 600}]
    async with (
        fake_engine.engine(prompt_tokens=280) as engine,
        up(engine, pool="both", tenants=tenants) as one,
        up(engine, pool="both", tenants=tenants) as two,
    ):
        small = {"x-tidegate-tenant": "small"}
        call = {"prompt": "x" * 1120, "max_tokens": 4, "headers": small}
        answers = [await each.ask("/v1/completions", **call) for each in (one, two, one, two)]
        assert [status for status, _, _ in answers] == [200, 200, 429, 429]
        assert answers[2][2]["x-tidegate-reason"] == "tenant-limit"
        assert 1 <= int(answers[2][2]["retry-after"]) <= 60
        assert (await one.ask(headers={"x-tidegate-tenant": "other"}))[0] == 200


async def test_a_call_that_is_predicted_again_while_it_waits_is_judged_by_its_last_prediction(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Any] = []
    monkeypatch.setattr(prometheus_metrics.Metrics, "on_call", lambda self, record: records.append(record))
    settings = {"dispatch": {"cap": 1}, "policy": {"name": "fcfs"}}
    async with fake_engine.engine() as engine, up(engine, **settings) as client, asyncio.TaskGroup() as group:
        line = Line(client, engine, group, until)
        await line.hold()
        await line.join("waiting")
        core = client.gateway.core
        admitted = next(each for each in core._admitted.values() if each.call.session == "waiting")
        admitted.call = dataclasses.replace(admitted.call, output_predicted=7)
        core.dispatcher.on_prediction(0.0, admitted.call)
        await line.release()
        assert engine.bodies[-1]["vllm_xargs"]["tg.out_pred"] == 7
        assert records[-1].call.output_predicted == 7
