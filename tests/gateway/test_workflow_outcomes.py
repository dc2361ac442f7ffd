"""How a workflow ended: its outcome, the time that was left, and the times of its stages."""

import asyncio
from typing import Any

import pytest
from workflow_requests import create, member, state_of

import fake_engine

STAGES = [{"name": "a"}]


async def test_the_outcome_of_a_workflow_is_shown_and_its_time_left_stops(up: Any, until: Any) -> None:
    async with fake_engine.engine(first_s=0.1) as engine, up(engine, store_options={"grace": "5s"}) as client:
        _, met = await create(client, deadline_ms=60_000, stages=STAGES)
        _, late = await create(client, deadline_ms=30, stages=STAGES)
        _, cancelled = await create(client, deadline_ms=60_000, stages=STAGES)
        assert (met["outcome"], met["ended_at"]) == (None, None)
        for flow in (met, late):
            await client.ask(headers=member(flow["id"], "a"))
        await client.send("DELETE", f"/v1/workflows/{cancelled['id']}")
        found = {}
        for flow in (met, late, cancelled):
            first = await state_of(client, flow["id"])
            assert first["ended_at"] <= first["deadline"] or first["left_ms"] < 0
            await asyncio.sleep(0.01)
            again = await state_of(client, flow["id"])
            assert again == first, "nothing of an ended workflow changes"
            found[flow["id"]] = (again["outcome"], again["left_ms"] > 0)
        assert list(found.values()) == [("met", True), ("late", False), ("cancelled", True)]
        (stage,) = (await state_of(client, met["id"]))["stages"]
        assert 100 <= stage["time_ms"] < 30_000 < stage["share_ms"] <= 60_000
        assert stage["slack_ms"] == stage["share_ms"] - stage["time_ms"]
        (stage,) = (await state_of(client, cancelled["id"]))["stages"]
        assert (stage["time_ms"], stage["share_ms"], stage["slack_ms"]) == (None, None, None)


async def test_an_undeclared_workflow_whose_calls_were_answered_is_met(up: Any, until: Any) -> None:
    deadline = {"x-tidegate-deadline-ms": "400"}
    async with fake_engine.engine() as engine, up(engine, store_options={"grace": "50ms"}) as client:

        async def outcome(flow: str) -> Any:
            return (await state_of(client, flow))["outcome"]

        assert (await client.ask(headers=member("well", "a", **deadline)))[0] == 200
        engine.status = 400
        assert (await client.ask(headers=member("badly", "a", **deadline)))[0] == 400
        for flow, expected in (("well", "met"), ("badly", "failed")):
            assert await until(lambda flow=flow: outcome(flow)) == expected
        well, badly = await state_of(client, "well"), await state_of(client, "badly")
        assert (well["state"], well["ended_at"] <= well["deadline"]) == ("done", True)
        assert [stage["state"] for stage in well["stages"]] == ["done"]
        assert badly["left_ms"] == -50, "it ended with its grace, whenever somebody looked"


async def test_a_stage_that_is_cut_ends_with_its_workflow(up: Any, until: Any) -> None:
    stages = [{"name": "a", "parallel": 3}]
    async with fake_engine.engine() as engine, up(engine) as client, asyncio.TaskGroup() as group:
        _, flow = await create(client, deadline_ms=60_000, stages=stages)
        await client.ask(headers=member(flow["id"], "a"))
        engine.first_s = 3600
        calls = [group.create_task(client.ask(headers=member(flow["id"], "a"))) for _ in range(2)]
        await until(lambda: engine.running == 2)
        await asyncio.sleep(0.2)
        _, ended, _ = await client.send("DELETE", f"/v1/workflows/{flow['id']}")
        (stage,) = ended["stages"]
        assert stage["time_ms"] >= 200
        assert stage["time_ms"] <= 60_000 - ended["left_ms"]
        await asyncio.gather(*calls)


async def test_a_workflow_that_is_settled_long_after_its_last_answer_is_listed(up: Any, until: Any) -> None:
    options = {"grace": "1.2s", "retention": "1s"}
    async with fake_engine.engine() as engine, up(engine, store_options=options) as client:
        await client.ask(headers=member("w", "a", **{"x-tidegate-deadline-ms": "100"}))

        async def listed() -> bool:
            _, answer, _ = await client.send("GET", "/v1/workflows?state=done")
            return [row["id"] for row in answer["data"]] == ["w"]

        await until(listed)


async def test_the_share_of_a_stage_is_what_its_workflow_gives_and_not_what_a_class_promises(up: Any) -> None:
    classes = [{"name": "fast", "deadline": "2s"}]
    stages = [{"name": "a"}, {"name": "b", "after": ["a"]}]
    async with fake_engine.engine() as engine, up(engine, classes=classes) as client:
        _, flow = await create(client, deadline_ms=60_000, stages=stages)
        await client.ask(headers=member(flow["id"], "a", **{"x-tidegate-class": "fast"}))
        shares = {stage["name"]: stage["share_ms"] for stage in (await state_of(client, flow["id"]))["stages"]}
        assert shares == {"a": pytest.approx(30_000, abs=3000), "b": None}


async def test_only_a_whole_workflow_of_a_template_teaches_which_of_its_stages_have_no_calls(up: Any) -> None:
    template = {
        "name": "text2sql",
        "stages": [{"name": "plan"}, {"name": "run", "after": ["plan"]}, {"name": "write", "after": ["run"]}],
    }
    async with fake_engine.engine() as engine, up(engine, workflows=[template]) as client:

        async def share(**declared: Any) -> tuple[str, int]:
            _, flow = await create(client, deadline_ms=90_000, **declared)
            await client.ask(headers=member(flow["id"], "plan"))
            return flow["id"], (await state_of(client, flow["id"]))["stages"][0]["share_ms"]

        flow, first = await share(template="text2sql")
        assert first == pytest.approx(30_000, rel=0.1)
        await client.send("POST", f"/v1/workflows/{flow}/complete")
        flow, second = await share(template="text2sql")
        assert second == pytest.approx(30_000, rel=0.2), "the first workflow was completed before its other stages"
        await client.send("POST", f"/v1/workflows/{flow}/stages/run/complete")
        await client.ask(headers=member(flow, "write"))
        assert (await state_of(client, flow))["state"] == "done"
        _, third = await share(template="text2sql")
        assert third == pytest.approx(45_000, rel=0.2)
        _, without = await share(stages=template["stages"])
        assert without == pytest.approx(30_000, rel=0.2), "it has no template"
