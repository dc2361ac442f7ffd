"""A client that watches a workflow sees each change of its state, until it has ended."""

import asyncio
from typing import Any

import grpc
import orjson
import pytest

import fake_engine
from tidegate_gateway.workflows import workflow_service
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

STAGES = [{"name": "plan"}, {"name": "check", "after": ["plan"]}]


async def test_events_show_each_stage_and_the_outcome(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        body = {"id": "w", "deadline_ms": 60_000, "stages": STAGES}
        assert (await client.send("POST", "/v1/workflows", json=body))[0] == 201
        seen: list[Any] = []
        async with client.http.get(f"{client.url}/v1/workflows/w/events") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                seen.append(orjson.loads(line[6:]))
                states = [stage["state"] for stage in seen[-1]["stages"]]
                if states == ["waiting", "waiting"]:
                    await client.ask(headers={"x-tidegate-workflow": "w", "x-tidegate-stage": "plan"})
                elif states == ["done", "waiting"]:
                    await client.send("POST", "/v1/workflows/w/stages/check/complete")
        assert [item["state"] for item in seen] == ["running"] * (len(seen) - 1) + ["done"]
        assert (seen[-1]["outcome"], seen[0]["outcome"]) == ("met", None)
        assert [stage["calls_done"] for stage in seen[-1]["stages"]] == [1, 0]


async def test_an_expired_workflow_ends_its_events(up: Any) -> None:
    async with up(store_options={"grace": "100ms"}) as client:
        await client.send("POST", "/v1/workflows", json={"id": "w", "deadline_ms": 200})
        async with client.http.get(f"{client.url}/v1/workflows/w/events") as response:
            *events, end = (await response.read()).strip().split(b"\n\n")
        assert end == b"data: [DONE]"
        assert [orjson.loads(event[6:])["outcome"] for event in events] == [None, "expired"]


async def test_an_unknown_workflow_and_another_tenants_are_not_found(up: Any) -> None:
    async with up() as client:
        tenant = {"x-tidegate-tenant": "acme"}
        await client.send("POST", "/v1/workflows", json={"id": "w", "deadline_ms": 60_000}, headers=tenant)
        for path, headers in (("none", {}), ("w", {"x-tidegate-tenant": "other"})):
            status, error, _ = await client.send("GET", f"/v1/workflows/{path}/events", headers=headers)
            assert (status, error["error"]["code"]) == (404, "workflow_not_found")


async def test_what_the_watches_of_a_tenant_show_has_a_pace(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow_service, "SHOWN_BYTES_PER_S", 1)
    async with up() as client:
        for name, tenant in (("one", "a"), ("two", "a"), ("three", "b")):
            body = {"id": name, "deadline_ms": 60_000, "stages": STAGES}
            await client.send("POST", "/v1/workflows", json=body, headers={"x-tidegate-tenant": tenant})

        async def shown(name: str, tenant: str) -> bool:
            url, headers = f"{client.url}/v1/workflows/{name}/events", {"x-tidegate-tenant": tenant}
            async with client.http.get(url, headers=headers) as response:
                return (await response.content.readline()).startswith(b"data: {")

        assert await shown("one", "a")
        later = asyncio.create_task(shown("two", "a"))
        assert await shown("three", "b"), "it does not wait for the other tenant"
        await asyncio.sleep(0.2)
        assert not later.done()
        later.cancel()


async def test_watch_over_grpc_ends_with_the_outcome(up: Any) -> None:
    async with up(listen={"grpcPort": 0}) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        stub = inference_pb2_grpc.WorkflowsStub(channel)
        specs = [inference_pb2.StageSpec(**stage) for stage in STAGES]
        await stub.Create(inference_pb2.CreateWorkflowRequest(id="w", deadline_ms=60_000, stages=specs))
        stream = aiter(stub.Watch(inference_pb2.GetWorkflowRequest(id="w")))
        assert (await anext(stream)).state == "running"
        await stub.CompleteStage(inference_pb2.CompleteStageRequest(id="w", stage="plan"))
        assert [stage.state for stage in (await anext(stream)).stages] == ["done", "waiting"]
        await stub.Cancel(inference_pb2.CancelWorkflowRequest(id="w"))
        assert [(item.state, item.outcome) async for item in stream] == [("cancelled", "cancelled")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(inference_pb2.GetWorkflowRequest(id="none")).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
