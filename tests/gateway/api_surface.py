"""Every documented call of the API, through the official OpenAI SDK and the generated gRPC client, streamed and not.

The tests of the simulated engine and of the real vLLM engine both drive these.
"""

import json
from typing import Any

import grpc
import httpx
import openai
import orjson
import pytest

from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

HELLO = [{"role": "user", "content": "Name a city."}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TEMPLATE = "Name a city of {{country}}."
ROWS = [{"country": f"country {i}"} for i in range(10)]


async def chat_and_completions(sdk: openai.AsyncOpenAI, model: str) -> None:
    whole = await sdk.chat.completions.create(model=model, messages=HELLO, max_tokens=6, temperature=0)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert 1 <= whole.usage.completion_tokens <= 6
    stream = await sdk.chat.completions.create(model=model, messages=HELLO, max_tokens=6, temperature=0, **USAGE)
    events = [event async for event in stream]
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage is not None
    completion = await sdk.completions.create(model=model, prompt="Once", max_tokens=6, temperature=0)
    pieces = await sdk.completions.create(model=model, prompt="Once", max_tokens=6, temperature=0, stream=True)
    joined = "".join([choice.text async for event in pieces for choice in event.choices])
    assert joined == completion.choices[0].text != ""


async def responses(sdk: openai.AsyncOpenAI, model: str) -> None:
    whole = await sdk.responses.create(model=model, input="Name a city.", max_output_tokens=16, temperature=0)
    assert whole.output_text
    assert whole.usage is not None
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        await sdk.responses.create(model=model, input="x", previous_response_id="r")


async def streamed_responses(sdk: openai.AsyncOpenAI, model: str) -> None:
    stream = await sdk.responses.create(
        model=model, input="Name a city.", max_output_tokens=16, temperature=0, stream=True
    )
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert any(event.type == "response.output_text.delta" for event in events)


async def models(sdk: openai.AsyncOpenAI, model: str) -> None:
    assert [item.id async for item in sdk.models.list()] == [model]
    assert (await sdk.models.retrieve(model)).id == model
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="none", messages=HELLO)


async def workflows(sdk: openai.AsyncOpenAI, model: str) -> None:
    declared = {"deadline_ms": 120_000, "stages": [{"name": "plan"}, {"name": "check", "after": ["plan"]}]}
    flow = await json_of(sdk, "POST", "/workflows", declared)
    assert flow["state"] == "running"
    headers = {"x-tidegate-workflow": flow["id"], "x-tidegate-stage": "plan"}
    await sdk.chat.completions.create(model=model, messages=HELLO, max_tokens=4, extra_headers=headers)
    await json_of(sdk, "POST", f"/workflows/{flow['id']}/stages/check/complete", {})
    events = await data_of(sdk, "GET", f"/workflows/{flow['id']}/events")
    assert (events[-1]["state"], events[-1]["outcome"]) == ("done", "met")
    assert (await json_of(sdk, "GET", f"/workflows/{flow['id']}"))["state"] == "done"
    other = await json_of(sdk, "POST", "/workflows", {"deadline_ms": 60_000})
    assert (await json_of(sdk, "DELETE", f"/workflows/{other['id']}"))["state"] == "cancelled"
    third = await json_of(sdk, "POST", "/workflows", {"deadline_ms": 60_000})
    assert (await json_of(sdk, "POST", f"/workflows/{third['id']}/complete", {}))["outcome"] == "met"
    listed = await json_of(sdk, "GET", "/workflows?state=done")
    assert {flow["id"], third["id"]} <= {item["id"] for item in listed["data"]}


async def relqueries(sdk: openai.AsyncOpenAI, model: str) -> None:
    asked = {"model": model, "template": TEMPLATE, "rows": ROWS, "max_tokens": 4, "temperature": 0}
    stream: Any = await sdk.post(
        "/relqueries", body=asked, cast_to=object, stream=True, stream_cls=openai.AsyncStream[object]
    )
    events = [event async for event in stream]
    results = [event for event in events if event["object"] == "relquery.row"]
    assert sorted(item["row"] for item in results) == list(range(len(ROWS)))
    assert all(item["text"] for item in results)
    assert events[-1]["status"] == "completed"
    created = await json_of(sdk, "POST", "/relqueries", {**asked, "stream": False})
    rest = await data_of(sdk, "GET", f"/relqueries/{created['id']}/rows?after=3")
    assert len([item for item in rest if item["object"] == "relquery.row"]) == len(ROWS) - 3
    shown = await json_of(sdk, "GET", f"/relqueries/{created['id']}")
    assert shown["request_counts"] == {"total": len(ROWS), "completed": len(ROWS), "failed": 0}
    assert (await json_of(sdk, "DELETE", f"/relqueries/{created['id']}"))["status"] == "completed"


async def over_grpc(target: str, model: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        inference, flows = inference_pb2_grpc.InferenceStub(channel), inference_pb2_grpc.WorkflowsStub(channel)
        messages = inference_pb2.Messages(messages=[inference_pb2.Message(**item) for item in HELLO])
        request = inference_pb2.GenerateRequest(model=model, messages=messages, max_tokens=6, temperature=0)
        events = [event async for event in inference.Generate(request)]
        assert "".join(event.text for event in events)
        assert events[-1].finished.completion_tokens >= 1
        for stream in (False, True):
            body = orjson.dumps({"model": model, "messages": HELLO, "max_tokens": 4, "stream": stream})
            call = inference_pb2.CallRequest(path="/v1/chat/completions", body=body)
            answers = [orjson.loads(event.body) async for event in inference.Call(call) if event.body]
            assert all(answer["object"].startswith("chat.completion") for answer in answers)
            assert (len(answers) == 1) != stream
        body = orjson.dumps({"model": model, "input": "Name a city.", "max_output_tokens": 16})
        call = inference_pb2.CallRequest(path="/v1/responses", body=body)
        (answer,) = [orjson.loads(event.body) async for event in inference.Call(call) if event.body]
        assert answer["object"] == "response"
        flow = await flows.Create(inference_pb2.CreateWorkflowRequest(deadline_ms=60_000))
        assert (await flows.Get(inference_pb2.GetWorkflowRequest(id=flow.id))).state == "running"
        watched = flows.Watch(inference_pb2.GetWorkflowRequest(id=flow.id))
        await flows.Complete(inference_pb2.CompleteWorkflowRequest(id=flow.id))
        assert [item.outcome async for item in watched][-1] == "met"
        listed = await flows.List(inference_pb2.ListWorkflowsRequest(state="done"))
        assert flow.id in [item.id for item in listed.workflows]
        relqueries = inference_pb2_grpc.RelQueriesStub(channel)
        rows = inference_pb2.RowList(rows=[inference_pb2.Row(values=row) for row in ROWS])
        asked = inference_pb2.SubmitRelQueryRequest(model=model, text=TEMPLATE, list=rows, max_tokens=4)
        found = [event async for event in relqueries.Submit(asked)]
        assert found[-1].relquery.completed == len(ROWS)
        again = relqueries.Rows(inference_pb2.RowsRequest(id=found[-1].relquery.id, after=5))
        assert len([event async for event in again if event.row.number]) == len(ROWS) - 5
        name = inference_pb2.GetRelQueryRequest(id=found[-1].relquery.id)
        assert (await relqueries.Get(name)).status == (await relqueries.Cancel(name)).status == "completed"


async def json_of(sdk: openai.AsyncOpenAI, method: str, path: str, body: Any = None) -> Any:
    """The JSON of a path that the SDK has no method for."""
    return json.loads((await _sent(sdk, method, path, body)).content)


async def data_of(sdk: openai.AsyncOpenAI, method: str, path: str) -> list[Any]:
    """The data of the events of such a path, without the end marker."""
    lines = (await _sent(sdk, method, path, None)).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def _sent(sdk: openai.AsyncOpenAI, method: str, path: str, body: Any) -> httpx.Response:
    send = {"GET": sdk.get, "POST": sdk.post, "DELETE": sdk.delete}[method]
    options: dict[str, Any] = {} if body is None else {"body": body}
    return await send(path, cast_to=httpx.Response, **options)
