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
TOOL = {
    "type": "function",
    "function": {
        "name": "find_city",
        "parameters": {
            "type": "object",
            "properties": {"country": {"type": "string", "maxLength": 12}},
            "required": ["country"],
            "additionalProperties": False,
        },
    },
}
ROWS = [{"country": f"country {i}"} for i in range(10)]
TABLE = "\n".join(["country", *(row["country"] for row in ROWS)]).encode() + b"\n"


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
    async with sdk.responses.stream(model=model, input="Name a city.", max_output_tokens=16, temperature=0) as followed:
        said = "".join([event.delta async for event in followed if event.type == "response.output_text.delta"])
    assert said, "the SDK follows the items and parts of the response"


async def embeddings(sdk: openai.AsyncOpenAI, model: str) -> None:
    one = await sdk.embeddings.create(model=model, input="a city")
    listed = await sdk.embeddings.create(model=model, input=["a city", "a river"], encoding_format="float")
    assert [item.index for item in listed.data] == [0, 1]
    vectors = [item.embedding for item in listed.data]
    assert vectors[0] == pytest.approx(one.data[0].embedding, abs=1e-6), "the SDK asks for base64 by default"
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-6)
    short = await sdk.embeddings.create(model=model, input=[1, 2, 3], dimensions=4)
    assert (len(short.data), len(short.data[0].embedding), short.usage.prompt_tokens) == (1, 4, 3)
    with pytest.raises(openai.BadRequestError, match="input"):
        await sdk.embeddings.create(model=model, input=[])


async def tools_and_structured_output(sdk: openai.AsyncOpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": HELLO, "tools": [TOOL], "temperature": 0}
    forced: Any = {"type": "function", "function": {"name": "find_city"}}
    whole = await sdk.chat.completions.create(**asked, tool_choice=forced)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "find_city"
    assert set(json.loads(call.function.arguments)) == {"country"}, call.function.arguments
    assert whole.choices[0].finish_reason in ("tool_calls", "stop")
    stream = await sdk.chat.completions.create(**asked, tool_choice=forced, **USAGE)
    deltas = [choice.delta async for event in stream for choice in event.choices]
    parts = [part.function for delta in deltas for part in delta.tool_calls or () if part.function is not None]
    assert [part.name for part in parts if part.name] == ["find_city"]
    assert set(json.loads("".join(part.arguments or "" for part in parts))) == {"country"}
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    formed = await sdk.chat.completions.create(
        model=model, messages=HELLO, response_format=form, max_tokens=64, temperature=0
    )
    assert isinstance(json.loads(formed.choices[0].message.content or "")["city"], str)


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
        await _inference_over_grpc(inference_pb2_grpc.InferenceStub(channel), model)
        await _workflows_over_grpc(inference_pb2_grpc.WorkflowsStub(channel), model, channel)
        await _relqueries_over_grpc(inference_pb2_grpc.RelQueriesStub(channel), model)


async def _inference_over_grpc(inference: Any, model: str) -> None:
    messages = inference_pb2.Messages(messages=[inference_pb2.Message(**item) for item in HELLO])
    request = inference_pb2.GenerateRequest(model=model, messages=messages, max_tokens=6, temperature=0)
    events = [event async for event in inference.Generate(request)]
    assert "".join(event.text for event in events)
    assert events[-1].finished.completion_tokens >= 1
    for path, asked, kind in (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}, "chat.completion"),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}, "text_completion"),
    ):
        for stream in (False, True):
            answers = await called(inference, path, {"model": model, "stream": stream, **asked})
            assert all(answer["object"].startswith(kind) for answer in answers)
            assert (len(answers) == 1) != stream
    asked = {"model": model, "input": "Name a city.", "max_output_tokens": 16}
    (answer,) = await called(inference, "/v1/responses", asked)
    assert answer["object"] == "response"
    events = await called(inference, "/v1/responses", {**asked, "stream": True})
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert any(event["type"] == "response.output_text.delta" for event in events)


async def _workflows_over_grpc(flows: Any, model: str, channel: grpc.aio.Channel) -> None:
    stages = [inference_pb2.StageSpec(name="plan"), inference_pb2.StageSpec(name="check", after=["plan"])]
    flow = await flows.Create(inference_pb2.CreateWorkflowRequest(deadline_ms=60_000, stages=stages))
    assert (await flows.Get(inference_pb2.GetWorkflowRequest(id=flow.id))).state == "running"
    watched = flows.Watch(inference_pb2.GetWorkflowRequest(id=flow.id))
    asked = inference_pb2.GenerateRequest(model=model, prompt="Plan.", max_tokens=4, workflow=flow.id, stage="plan")
    assert [event async for event in inference_pb2_grpc.InferenceStub(channel).Generate(asked)]
    done = await flows.CompleteStage(inference_pb2.CompleteStageRequest(id=flow.id, stage="check"))
    assert {stage.name: stage.state for stage in done.stages} == {"plan": "done", "check": "done"}
    assert [item.outcome async for item in watched][-1] == "met"
    other = await flows.Create(inference_pb2.CreateWorkflowRequest(deadline_ms=60_000))
    assert (await flows.Complete(inference_pb2.CompleteWorkflowRequest(id=other.id))).outcome == "met"
    listed = await flows.List(inference_pb2.ListWorkflowsRequest(state="done"))
    assert {flow.id, other.id} <= {item.id for item in listed.workflows}
    third = await flows.Create(inference_pb2.CreateWorkflowRequest(deadline_ms=60_000))
    assert (await flows.Cancel(inference_pb2.CancelWorkflowRequest(id=third.id))).state == "cancelled"


async def _relqueries_over_grpc(relqueries: Any, model: str) -> None:
    rows = inference_pb2.RowList(rows=[inference_pb2.Row(values=row) for row in ROWS])
    asked = inference_pb2.SubmitRelQueryRequest(model=model, text=TEMPLATE, list=rows, max_tokens=4)
    found = [event async for event in relqueries.Submit(asked)]
    assert found[-1].relquery.completed == len(ROWS)
    again = relqueries.Rows(inference_pb2.RowsRequest(id=found[-1].relquery.id, after=5))
    assert len([event async for event in again if event.row.number]) == len(ROWS) - 5
    name = inference_pb2.GetRelQueryRequest(id=found[-1].relquery.id)
    assert (await relqueries.Get(name)).status == (await relqueries.Cancel(name)).status == "completed"
    file = inference_pb2.RowFile(format="CSV", content=TABLE)
    asked = inference_pb2.SubmitRelQueryRequest(model=model, text=TEMPLATE, file=file, max_tokens=4)
    assert [event async for event in relqueries.Submit(asked)][-1].relquery.completed == len(ROWS)


async def rows_of_an_address_over_grpc(target: str, model: str, url: str) -> None:
    """A relQuery with the rows at `url`, where `TABLE` is served."""
    async with grpc.aio.insecure_channel(target) as channel:
        asked = inference_pb2.SubmitRelQueryRequest(model=model, text=TEMPLATE, rows_url=url, max_tokens=4)
        events = [event async for event in inference_pb2_grpc.RelQueriesStub(channel).Submit(asked)]
    assert events[-1].relquery.completed == len(ROWS)
    assert all(event.row.text for event in events if event.WhichOneof("event") == "row")


async def called(inference: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON of the answers of `Call`."""
    call = inference_pb2.CallRequest(path=path, body=orjson.dumps(body))
    return [orjson.loads(event.body) async for event in inference.Call(call) if event.body]


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
