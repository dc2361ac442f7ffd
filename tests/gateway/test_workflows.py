"""The life of a workflow over HTTP: created by request or by header, joined, finished, ended once."""

import asyncio
from typing import Any

import pytest
from workflow_requests import create, member, state_of

import fake_engine

THREE = [{"name": "a"}, {"name": "b", "after": ["a"]}, {"name": "c", "after": ["b"]}]


async def test_a_declared_workflow_is_done_when_its_stages_are(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, flow = await create(client, deadline_ms=60_000, stages=THREE, tenant="acme")
        assert (status, flow["state"], flow["tenant"], flow["deadline_ms"]) == (201, "running", "acme", 60_000)
        for stage in "abc":
            assert (await state_of(client, flow["id"]))["state"] == "running"
            status, _, _ = await client.ask(headers=member(flow["id"], stage))
            assert status == 200
        ended = await state_of(client, flow["id"])
        assert ended["state"] == "done"
        assert [stage["state"] for stage in ended["stages"]] == ["done"] * 3


async def test_a_workflow_that_is_done_teaches_its_template(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=THREE, tenant="acme")
        for stage in "abc":
            assert client.gateway.core.workflows.stages("acme") == {}
            await client.ask(headers=member(flow["id"], stage))

        async def learned() -> bool:
            return list(client.gateway.core.workflows.stages("acme")) == ["a", "b", "c"]

        await until(learned)
        rests = [client.gateway.core.remaining_work.predict(("acme", "", stage)) for stage in "abc"]
        assert rests[0] > rests[1] > rests[2] == 0.0


async def test_a_stages_budget_is_its_share_of_the_time_left(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=90_000, stages=THREE)
        await client.ask(headers=member(flow["id"], "a"))
        first = engine.bodies[0]["vllm_xargs"]
        assert first["tg.workflow"] == flow["id"]
        assert first["tg.budget_ms"] == pytest.approx(30_000, rel=0.05), "three like stages share the time evenly"
        assert first["tg.left_ms"] > 0
        await client.ask(headers=member(flow["id"], "c"))
        assert engine.bodies[1]["vllm_xargs"]["tg.budget_ms"] == pytest.approx(90_000, rel=0.05)


async def test_the_first_call_with_a_deadline_creates_the_workflow_and_the_first_deadline_wins(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, _, _ = await client.ask(headers=member("w1", "a", **{"x-tidegate-deadline-ms": "50000"}))
        assert status == 200
        await client.ask(headers=member("w1", "b", **{"x-tidegate-deadline-ms": "1000000"}))
        flow = await state_of(client, "w1")
        assert (flow["deadline_ms"], flow["state"]) == (50_000, "running")
        assert [(stage["name"], stage["after"], stage["state"]) for stage in flow["stages"]] == [
            ("a", [], "done"),
            ("b", ["a"], "running"),
        ], "nobody said how many calls b has"
        status, ended, _ = await client.send("POST", "/v1/workflows/w1/complete")
        assert (status, ended["state"]) == (200, "done")


async def test_an_unknown_workflow_without_a_deadline_is_404(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, answer, _ = await client.ask(headers=member("nobody", "a"))
        assert (status, answer["error"]["code"]) == (404, "workflow_not_found")
        assert "x-tidegate-deadline-ms" in answer["error"]["message"]
        assert engine.bodies == []


async def test_declared_parallel_calls_finish_a_stage_together(up: Any) -> None:
    stages = [{"name": "link"}, {"name": "many", "after": ["link"], "parallel": 3}]
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=stages)
        await client.ask(headers=member(flow["id"], "link"))
        await asyncio.gather(*(client.ask(headers=member(flow["id"], "many")) for _ in range(2)))
        assert (await state_of(client, flow["id"]))["state"] == "running"
        await client.ask(headers=member(flow["id"], "many"))
        assert (await state_of(client, flow["id"]))["state"] == "done"


async def test_undeclared_parallel_calls_are_over_when_a_later_stage_starts(up: Any, until: Any) -> None:
    stages = [{"name": "many"}, {"name": "last", "after": ["many"]}]
    async with fake_engine.engine(first_s=1.5) as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=stages)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(client.ask(headers=member(flow["id"], "many")))
            await until(lambda: engine.running == 3)
        many, _last = (await state_of(client, flow["id"]))["stages"]
        assert (many["calls_done"], many["state"]) == (3, "running")
        await client.ask(headers=member(flow["id"], "last"))
        ended = await state_of(client, flow["id"])
        assert [stage["state"] for stage in ended["stages"]] == ["done", "done"]
        assert ended["state"] == "done"


async def test_a_template_brings_stages_and_deadline(up: Any) -> None:
    template = {
        "name": "t2s",
        "deadline": "2m",
        "stages": [{"name": "link"}, {"name": "fix", "after": ["link"], "repeat": 2}],
    }
    async with fake_engine.engine() as engine, up(engine, workflows=[template]) as client:
        status, flow = await create(client, template="t2s")
        assert (status, flow["deadline_ms"], len(flow["stages"])) == (201, 120_000, 2)
        for stage in ("link", "fix"):
            await client.ask(headers=member(flow["id"], stage))
        assert (await state_of(client, flow["id"]))["state"] == "running", "one of two repetitions"
        await client.ask(headers=member(flow["id"], "fix"))
        assert (await state_of(client, flow["id"]))["state"] == "done"
        status, answer = await create(client, template="nope")
        assert (status, answer["error"]["param"]) == (400, "template")


async def test_the_stages_of_an_undeclared_workflow_may_loop_until_the_client_completes_them(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        plan, act = member("w1", "plan", **{"x-tidegate-deadline-ms": "60000"}), member("w1", "act")
        for stage in (plan, plan, act, plan, act, act):
            assert (await client.ask(headers=stage))[0] == 200
        states = [stage["state"] for stage in (await state_of(client, "w1"))["stages"]]
        assert states == ["done", "running"]
        await client.send("POST", "/v1/workflows/w1/stages/plan/complete")
        await client.send("POST", "/v1/workflows/w1/stages/act/complete")
        for stage in (plan, act):
            status, answer, _ = await client.ask(headers=stage)
            assert (status, answer["error"]["code"]) == (409, "stage_already_done")
        assert len(engine.bodies) == 6


async def test_a_stage_that_is_done_takes_no_more_calls(up: Any) -> None:
    stages = [{"name": "a"}, {"name": "b", "parallel": 2}, {"name": "tool"}, {"name": "last"}]
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=stages)
        await client.send("POST", f"/v1/workflows/{flow['id']}/stages/tool/complete")
        for stage in ("a", "b", "b"):
            assert (await client.ask(headers=member(flow["id"], stage)))[0] == 200
        for stage in ("a", "b", "tool"):
            status, answer, _ = await client.ask(headers=member(flow["id"], stage))
            assert (status, answer["error"]["code"]) == (409, "stage_already_done")
            assert answer["error"]["param"] == "x-tidegate-stage"
        assert len(engine.bodies) == 3


async def test_a_workflow_takes_calls_after_its_deadline_until_its_grace_is_over(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store_options={"grace": "60s"}) as client:
        _, flow = await create(client, deadline_ms=1, stages=THREE)

        async def late() -> bool:
            return (await state_of(client, flow["id"]))["left_ms"] < 0

        await until_true(late)
        assert (await client.ask(headers=member(flow["id"], "a")))[0] == 200


async def test_a_tool_step_completes_a_stage_once(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=THREE)
        path = f"/v1/workflows/{flow['id']}/stages/a/complete"
        status, answer, _ = await client.send("POST", path)
        assert (status, answer["stages"][0]["state"]) == (200, "done")
        status, answer, _ = await client.send("POST", path)
        assert (status, answer["error"]["code"]) == (409, "stage_already_done")
        assert "with the Idempotency-Key that it had" in answer["error"]["message"]
        status, answer, _ = await client.send("POST", f"/v1/workflows/{flow['id']}/stages/zzz/complete")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "stage_not_found", "stage")


async def test_an_idempotency_key_gets_the_same_answer(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        first = await create(client, key="k1", deadline_ms=60_000, stages=THREE)
        assert await create(client, key="k1", deadline_ms=60_000, stages=THREE) == first
        status, answer = await create(client, key="k1", deadline_ms=70_000)
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        path = f"/v1/workflows/{first[1]['id']}/stages/a/complete"
        key = {"Idempotency-Key": "k2"}
        once = await client.send("POST", path, headers=key)
        twice = await client.send("POST", path, headers=key)
        assert once[:2] == twice[:2]
        path = f"/v1/workflows/{first[1]['id']}/complete"
        once, twice = await client.send("POST", path, headers=key), await client.send("POST", path, headers=key)
        assert once[:2] == twice[:2]
        assert once[0] == 200


async def test_an_idempotency_key_is_its_tenants_own(up: Any) -> None:
    async with up(seen=False) as client:
        answers = {}
        for tenant in ("one", "two", "one"):
            headers = {"Idempotency-Key": "same", "x-tidegate-tenant": tenant}
            body = {"deadline_ms": 60_000}
            status, flow, _ = await client.send("POST", "/v1/workflows", json=body, headers=headers)
            assert (status, flow["tenant"]) == (201, tenant)
            assert answers.setdefault(tenant, flow["id"]) == flow["id"]
        assert len(set(answers.values())) == 2


async def test_a_tenants_workflows_are_unknown_to_other_tenants_and_open_to_anonymous_requests(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=THREE, tenant="one")
        path = f"/v1/workflows/{flow['id']}"
        two = {"x-tidegate-tenant": "two"}
        for method, where in (
            ("GET", path),
            ("DELETE", path),
            ("POST", path + "/complete"),
            ("POST", path + "/stages/a/complete"),
        ):
            status, answer, _ = await client.send(method, where, headers=two)
            assert (status, answer["error"]["code"]) == (404, "workflow_not_found")
        for more in ({}, {"x-tidegate-deadline-ms": "60000"}):
            status, answer, _ = await client.ask(headers={**member(flow["id"], "a"), **two, **more})
            assert (status, answer["error"]["code"]) == (404, "workflow_not_found")
        assert engine.bodies == []
        assert (await state_of(client, flow["id"]))["stages"][0]["state"] == "waiting", "nothing was changed"
        one = {"x-tidegate-tenant": "one"}
        assert (await client.ask(headers={**member(flow["id"], "a"), **one}))[0] == 200
        assert (await client.send("POST", path + "/stages/b/complete", headers=one))[0] == 200
        assert (await client.ask(headers=member(flow["id"], "c")))[0] == 200
        status, shown, _ = await client.send("GET", path, headers=one)
        assert (status, shown["state"]) == (200, "done")


async def test_a_list_shows_a_tenant_its_own_workflows(up: Any) -> None:
    async with up(seen=False) as client:
        ids = {}
        for name in ("mine", "other1", "other2", "other3"):
            tenant = name.rstrip("123")
            ids[name] = (await create(client, deadline_ms=60_000, tenant=tenant))[1]["id"]
        await client.send("DELETE", f"/v1/workflows/{ids['other3']}")
        for query, headers, found in (
            ("", {"x-tidegate-tenant": "mine"}, {"mine"}),
            ("?limit=1", {"x-tidegate-tenant": "mine"}, {"mine"}),
            ("?state=running", {"x-tidegate-tenant": "other"}, {"other1", "other2"}),
            ("?state=cancelled", {"x-tidegate-tenant": "other"}, {"other3"}),
            ("?state=cancelled", {"x-tidegate-tenant": "mine"}, set()),
            ("", {"x-tidegate-tenant": "nobody"}, set()),
            ("", {}, set(ids)),
        ):
            _, answer, _ = await client.send("GET", "/v1/workflows" + query, headers=headers)
            assert {row["id"] for row in answer["data"]} == {ids[name] for name in found}
            assert not answer["has_more"]


async def test_a_body_cannot_name_another_tenant_than_the_header(up: Any) -> None:
    async with up(seen=False) as client:
        options = {"json": {"deadline_ms": 60_000, "tenant": "two"}, "headers": {"x-tidegate-tenant": "one"}}
        status, answer, _ = await client.send("POST", "/v1/workflows", **options)
        assert (status, answer["error"]["param"]) == (400, "tenant")


async def test_a_repeated_end_is_counted_once(up: Any, until: Any) -> None:
    async with up(seen=False) as client:
        _, flow = await create(client, deadline_ms=60_000)
        for _ in range(3):
            path, headers = f"/v1/workflows/{flow['id']}/complete", {"Idempotency-Key": "k"}
            assert (await client.send("POST", path, headers=headers))[0] == 200
        _, last = await create(client, deadline_ms=60_000)
        await client.send("DELETE", f"/v1/workflows/{last['id']}")
        counted = client.gateway.metrics.registry.get_sample_value

        def ended(outcome: str) -> float | None:
            return counted("tidegate_workflow_deadline_total", {"template": "none", "outcome": outcome})

        await until(lambda: ended("cancelled") == 1.0)
        assert ended("met") == 1.0


async def test_a_stage_without_parallel_is_undeclared_in_a_request_and_in_a_template(up: Any, until: Any) -> None:
    template = {"name": "t", "deadline": "1m", "stages": [{"name": "many"}, {"name": "last", "after": ["many"]}]}
    async with fake_engine.engine(first_s=0.2) as engine, up(engine, workflows=[template]) as client:
        for body in ({"template": "t"}, {"deadline_ms": 60_000, "stages": template["stages"]}):
            _, flow = await create(client, **body)
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(client.ask(headers=member(flow["id"], "many")))
                await until(lambda: engine.running == 2)
            stage = (await state_of(client, flow["id"]))["stages"][0]
            assert (stage["parallel"], stage["calls_done"], stage["state"]) == (None, 2, "running")


async def test_cancelling_ends_its_calls_in_the_engine(up: Any, until: Any) -> None:
    async with fake_engine.engine(hang=True) as engine, up(engine) as client, asyncio.TaskGroup() as group:
        _, flow = await create(client, deadline_ms=60_000, stages=THREE)
        call = group.create_task(client.ask(headers=member(flow["id"], "a")))
        await until(lambda: engine.running == 1)
        status, answer, _ = await client.send("DELETE", f"/v1/workflows/{flow['id']}")
        assert (status, answer["state"]) == (200, "cancelled")
        status, answer, _ = await call
        assert (status, answer["error"]["code"]) == (409, "workflow_ended")
        await until(lambda: engine.running == 0)
        status, answer, _ = await client.ask(headers=member(flow["id"], "b"))
        assert (status, answer["error"]["code"]) == (409, "workflow_ended")


async def test_a_workflow_expires_after_its_deadline_and_grace_once(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store_options={"grace": "50ms"}) as client:
        _, flow = await create(client, deadline_ms=50, stages=THREE, template=None)

        async def ended() -> bool:
            return (await state_of(client, flow["id"]))["state"] != "running"

        await until(ended)
        assert (await state_of(client, flow["id"]))["state"] == "expired"
        status, answer, _ = await client.send("POST", f"/v1/workflows/{flow['id']}/complete")
        assert (status, answer["error"]["code"]) == (409, "workflow_ended")
        assert (await state_of(client, flow["id"]))["state"] == "expired"


async def test_housekeeping_expires_workflows_without_requests(up: Any, until: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store_options={"grace": "10ms"}) as client:
        _, flow = await create(client, deadline_ms=1, stages=THREE)
        counted = client.gateway.metrics.registry.get_sample_value
        labels = {"template": "none", "outcome": "expired"}
        await until(lambda: counted("tidegate_workflow_deadline_total", labels) == 1.0)
        _, listed, _ = await client.send("GET", "/v1/workflows?state=expired")
        assert [row["id"] for row in listed["data"]] == [flow["id"]]


async def test_workflows_are_listed_by_state(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        flows = [(await create(client, deadline_ms=60_000, stages=THREE))[1]["id"] for _ in range(3)]
        await client.send("POST", f"/v1/workflows/{flows[0]}/complete")
        await client.send("DELETE", f"/v1/workflows/{flows[1]}")
        found = {}
        for state in ("running", "done", "cancelled", "expired"):
            _, answer, _ = await client.send("GET", f"/v1/workflows?state={state}")
            found[state] = [row["id"] for row in answer["data"]]
        assert found == {"done": [flows[0]], "cancelled": [flows[1]], "running": [flows[2]], "expired": []}
        _, answer, _ = await client.send("GET", "/v1/workflows")
        assert {row["id"] for row in answer["data"]} == set(flows)
        status, answer, _ = await client.send("GET", "/v1/workflows?state=odd")
        assert (status, answer["error"]["param"]) == (400, "state")


async def test_a_list_has_at_most_its_limit_of_rows_and_says_whether_there_are_more(up: Any) -> None:
    async with up(seen=False) as client:
        for _ in range(3):
            await create(client, deadline_ms=60_000)
        for limit, rows, more in ((2, 2, True), (3, 3, False), (1000, 3, False)):
            _, answer, _ = await client.send("GET", f"/v1/workflows?limit={limit}")
            assert (answer["object"], len(answer["data"]), answer["has_more"]) == ("list", rows, more)
        for limit in ("0", "1001", "-1", "two", ""):
            status, answer, _ = await client.send("GET", f"/v1/workflows?limit={limit}")
            assert (status, answer["error"]["param"]) == (400, "limit")
        for query, param in (("status=running", "status"), ("limit=1&limit=2", "limit")):
            status, answer, _ = await client.send("GET", f"/v1/workflows?{query}")
            assert (status, answer["error"]["param"]) == (400, param)


async def test_an_empty_idempotency_key_is_none_to_rely_on(up: Any) -> None:
    async with up(seen=False) as client:
        status, answer, _ = await client.send(
            "POST", "/v1/workflows", json={"deadline_ms": 60_000}, headers={"idempotency-key": ""}
        )
        assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/workflows/a%20b", "id"),
        ("GET", "/v1/workflows/nobody", "id"),
        ("DELETE", "/v1/workflows/nobody", "id"),
        ("POST", "/v1/workflows/a%20b/complete", "id"),
        ("POST", "/v1/workflows/w/stages/a%20b/complete", "stage"),
    ],
)
async def test_a_wrong_path_parameter_is_named(up: Any, method: str, path: str, param: str) -> None:
    async with up(seen=False) as client:
        status, answer, _ = await client.send(method, path)
        assert (status, answer["error"]["param"]) in ((400, param), (404, param))


async def test_a_failed_call_does_not_count_and_may_be_repeated(up: Any) -> None:
    async with fake_engine.engine(status=500) as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=[{"name": "a"}])
        status, _, _ = await client.ask(headers=member(flow["id"], "a"))
        assert status >= 500
        engine.status = 200

        async def answered() -> bool:
            return (await client.ask(headers=member(flow["id"], "a")))[0] == 200

        await until_true(answered)
        assert (await state_of(client, flow["id"]))["state"] == "done"


async def until_true(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_a_done_workflow_answers_only_the_call_that_it_knows_again_and_does_not_change(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=[{"name": "a", "parallel": 2}])
        mine, other = ({"idempotency-key": key, **member(flow["id"], "a")} for key in ("k1", "k2"))
        for _ in range(2):
            assert (await client.ask(headers=mine))[0] == 200
        assert (await state_of(client, flow["id"]))["stages"][0]["calls_done"] == 1, "the same call counts once"
        await client.ask(headers=other)
        before = await state_of(client, flow["id"])
        assert before["state"] == "done"
        assert (await client.ask(headers=mine))[0] == 200
        for headers in (member(flow["id"], "a"), member(flow["id"], "new"), {**mine, "idempotency-key": "k3"}):
            status, answer, _ = await client.ask(headers=headers)
            assert (status, answer["error"]["code"]) == (409, "workflow_ended")
            assert answer["error"]["param"] == "x-tidegate-workflow"
        after = await state_of(client, flow["id"])
        assert {**before, "left_ms": 0} == {**after, "left_ms": 0}


async def test_a_clients_own_id_exists_once(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        assert (await create(client, id="mine", deadline_ms=60_000))[0] == 201
        status, answer = await create(client, id="mine", deadline_ms=60_000)
        assert (status, answer["error"]["code"]) == (409, "workflow_exists")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, "deadline_ms", id="no deadline"),
        pytest.param({"deadline_ms": -5}, "deadline_ms", id="negative deadline"),
        pytest.param({"deadline_ms": 10**15}, "deadline_ms", id="absurd deadline"),
        pytest.param({"deadline_ms": "soon"}, "deadline_ms", id="deadline in words"),
        pytest.param({"deadline_ms": True}, "deadline_ms", id="deadline as boolean"),
        pytest.param(
            {"deadline_ms": 1000, "stages": [{"name": "a", "after": ["b"]}]}, "stages", id="unknown predecessor"
        ),
        pytest.param({"deadline_ms": 1000, "stages": [{"name": "a"}, {"name": "a"}]}, "stages", id="stage twice"),
        pytest.param({"deadline_ms": 1000, "stages": [{"name": "a", "after": ["a"]}]}, "stages", id="cycle"),
        pytest.param({"deadline_ms": 1000, "stages": "abc"}, "stages", id="stages as text"),
        pytest.param(
            {"deadline_ms": 1000, "stages": [{"name": "a", "parallel": -1}]}, "stages[0].parallel", id="parallel"
        ),
        pytest.param(
            {"deadline_ms": 1000, "stages": [{"name": "a", "parallel": 0}]}, "stages[0].parallel", id="no parallel"
        ),
        pytest.param({"deadline_ms": 1000, "stages": [{"name": "a", "repeat": 0}]}, "stages[0].repeat", id="repeat"),
        pytest.param({"deadline_ms": 1000, "stages": [{"name": "a\nb"}]}, "stages[0].name", id="control character"),
        pytest.param({"deadline_ms": 1000, "surprise": 1}, "surprise", id="unknown field"),
        pytest.param({"deadline_ms": 1000, "tenant": 7}, "tenant", id="tenant as number"),
        pytest.param({"deadline_ms": 1000, "tenant": []}, "tenant", id="tenant as list"),
        pytest.param({"deadline_ms": 1000, "tenant": "ü"}, "tenant", id="tenant that no header can name"),
        pytest.param({"deadline_ms": 1000, "id": 0}, "id", id="id as number"),
        pytest.param({"deadline_ms": 1000, "id": []}, "id", id="id as list"),
        pytest.param({"deadline_ms": 1000, "id": {}}, "id", id="id as object"),
        pytest.param({"deadline_ms": 1000, "id": ""}, "id", id="empty id"),
        pytest.param({"deadline_ms": 1000, "stages": [{"name": "a", "after": 0}]}, "stages[0].after", id="after"),
    ],
)
async def test_a_wrong_declaration_is_an_error_that_names_its_field(up: Any, body: dict[str, Any], param: str) -> None:
    async with up(seen=False) as client:
        status, answer = await create(client, **body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_an_unknown_field_of_a_workflow_is_named_with_the_nearest_one(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        status, error, _ = await client.send("POST", "/v1/workflows", json={"deadline": 5000})
        assert (status, error["error"]["param"]) == (400, "deadline")
        assert "deadline is no field of a workflow; did you mean deadline_ms?" in error["error"]["message"]


async def test_a_repeated_call_of_a_done_workflow_teaches_nothing(up: Any) -> None:
    stages = [{"name": "a"}, {"name": "b", "after": ["a"]}]
    async with fake_engine.engine() as engine, up(engine) as client:
        _, flow, _ = await client.send("POST", "/v1/workflows", json={"deadline_ms": 60_000, "stages": stages})
        first = {"idempotency-key": "k1", **member(flow["id"], "a")}
        assert (await client.ask(headers=first))[0] == 200
        assert (await client.ask(headers=member(flow["id"], "b")))[0] == 200
        for stage in ("a", "b"):
            await client.send("POST", f"/v1/workflows/{flow['id']}/stages/{stage}/complete")
        learned = client.gateway.core.remaining_work.predict(("", "", "a"))
        assert learned is not None
        assert (await client.ask(headers=first))[0] == 200
        assert client.gateway.core.remaining_work.predict(("", "", "a")) == learned
