"""RelQueries over gRPC, through the generated client: the same rows, results and errors as over HTTP."""

from typing import Any

import grpc
import orjson
import pytest
import relquery_requests
from google.rpc import error_details_pb2, status_pb2

import fake_engine
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

LISTEN = {"grpcPort": 0}


def request(count: int = 12, **fields: Any) -> inference_pb2.SubmitRelQueryRequest:
    rows = [inference_pb2.Row(values=row) for row in relquery_requests.rows(count)]
    given = {"model": "fake", "text": relquery_requests.TEMPLATE, "list": inference_pb2.RowList(rows=rows)}
    return inference_pb2.SubmitRelQueryRequest(**(given | {"max_tokens": 2} | fields))


def reason(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """The code and the field of a failed call."""
    (raw,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status_pb2.Status.FromString(raw).details)
    return info.reason, info.metadata.get("param", "")


async def test_rows_stream_back_between_the_relquery_and_its_end(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            stub = inference_pb2_grpc.RelQueriesStub(channel)
            asked = request(30, tenant="acme", more_fields='{"temperature": 0}', deadline_ms=60_000)
            events = [event async for event in stub.Submit(asked)]
            kinds = [event.WhichOneof("event") for event in events]
            assert (kinds[0], kinds[-1]) == ("relquery", "relquery")
            last = events[-1].relquery
            assert (last.status, last.total, last.completed, last.failed) == ("completed", 30, 30, 0)
            rows = [event.row for event in events if event.WhichOneof("event") == "row"]
            assert [row.number for row in rows] == list(range(1, 31))
            assert sorted(row.row for row in rows) == list(range(30))
            assert {(row.text, row.finish_reason, row.completion_tokens) for row in rows} == {("w0 w1 ", "length", 2)}
            assert orjson.loads(rows[0].json)["object"] == "relquery.row"
            metadata = (("x-tidegate-tenant", "acme"),)
            rest = [
                event.row
                async for event in stub.Rows(inference_pb2.RowsRequest(id=last.id, after=21), metadata=metadata)
                if event.WhichOneof("event") == "row"
            ]
            assert rest == rows[21:]
            assert (await stub.Get(inference_pb2.GetRelQueryRequest(id=last.id))).status == "completed"
        arguments = engine.bodies[0]["vllm_xargs"]
        assert (arguments["tg.relquery"], arguments["tg.tenant"], arguments["tg.relquery_size"]) == (
            last.id,
            "acme",
            30,
        )
        assert engine.bodies[0]["temperature"] == 0


@pytest.mark.parametrize(
    ("kind", "content"), [("CSV", b"city\n" + b"x\n" * 10), ("JSON_LINES", b'{"city": "x"}\n' * 10)]
)
async def test_rows_may_be_a_file_and_the_template_messages(up: Any, kind: str, content: bytes) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            file = inference_pb2.RowFile(format=kind, content=content)
            messages = inference_pb2.Messages(messages=[inference_pb2.Message(role="user", content="{{city}}")])
            asked = inference_pb2.SubmitRelQueryRequest(model="fake", messages=messages, file=file)
            events = [event async for event in inference_pb2_grpc.RelQueriesStub(channel).Submit(asked)]
        assert events[-1].relquery.completed == 10
        assert engine.bodies[0]["messages"] == [{"role": "user", "content": "x"}]


async def test_a_cancelled_relquery_ends_its_stream(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(hang=True) as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stub = inference_pb2_grpc.RelQueriesStub(channel)
        stream = aiter(stub.Submit(request(id="mine")))
        assert (await anext(stream)).relquery.id == "mine"
        await until(lambda: engine.running > 0)
        assert (await stub.Cancel(inference_pb2.GetRelQueryRequest(id="mine"))).status == "cancelled"
        assert [event.relquery.status async for event in stream][-1] == "cancelled"
        await until(lambda: engine.running == 0)


async def test_a_row_without_an_answer_has_an_error(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            stub = inference_pb2_grpc.RelQueriesStub(channel)
            events = [event async for event in stub.Submit(request(10))]
        errors = [event.row.error for event in events if event.WhichOneof("event") == "row"]
        assert {error.code for error in errors} == {"invalid_request"}
        assert events[-1].relquery.failed == 10


async def test_a_finish_reason_that_is_no_text_counts_as_absent(up: Any) -> None:
    broken = {"choices": [{"index": 0, "text": "x", "finish_reason": 5}], "usage": {"completion_tokens": "many"}}
    async with fake_engine.engine(garbage=orjson.dumps(broken)) as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            stub = inference_pb2_grpc.RelQueriesStub(channel)
            events = [event async for event in stub.Submit(request(10))]
        rows = [event.row for event in events if event.WhichOneof("event") == "row"]
        assert [(row.text, row.finish_reason, row.completion_tokens) for row in rows] == [("x", "", 0)] * 10
        assert events[-1].relquery.completed == 10


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "nope"}, "model_not_found", "model"),
        ({"text": "{{place}}"}, "invalid_request", "template"),
        ({"list": inference_pb2.RowList()}, "invalid_request", "rows"),
        ({"list": None}, "invalid_request", "rows"),
        ({"list": None, "file": inference_pb2.RowFile(content=b"x")}, "invalid_request", "file.format"),
        ({"list": None, "rows_url": "https://x/y.csv"}, "invalid_request", "rows_url"),
        ({"more_fields": "["}, "invalid_request", ""),
        ({"more_fields": "[]"}, "invalid_request", "more_fields"),
        ({"more_fields": '{"model": "x"}'}, "invalid_request", "more_fields"),
        ({"more_fields": '{"n": 3}'}, "invalid_request", "n"),
        ({"id": "a b"}, "invalid_request", "id"),
        ({"deadline_ms": 0}, "invalid_request", "deadline_ms"),
    ],
)
async def test_wrong_requests_name_their_field(up: Any, fields: dict[str, Any], code: str, param: str) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.RelQueriesStub(channel).Submit(request(**fields)).read()
        assert reason(caught.value) == (code, param)
        assert not engine.bodies


async def test_an_unknown_relquery_is_not_found(up: Any) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.grpc) as channel:
        stub = inference_pb2_grpc.RelQueriesStub(channel)
        for step in (stub.Get, stub.Cancel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await step(inference_pb2.GetRelQueryRequest(id="none"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert reason(caught.value) == ("relquery_not_found", "id")


async def test_a_row_has_a_bound_of_values(up: Any) -> None:
    values = dict.fromkeys(map(str, range(2000)), "x")
    rows = inference_pb2.RowList(rows=[inference_pb2.Row(values=values)])
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="row 0 has 2000 values, and at most 1024") as caught:
                await inference_pb2_grpc.RelQueriesStub(channel).Submit(request(text="{{1}}", list=rows)).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason(caught.value)[1] == "rows"
        assert not engine.bodies
