"""Events of an engine's stream as calls over gRPC read them: whatever their form, in bounded steps."""

from typing import Any

import grpc
import orjson
import pytest

import fake_engine
from tidegate_gateway.edge import grpc_inference
from tidegate_gateway.openai import bounded_json, completions, error_table, parsed_request, request_fields
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

LISTEN = {"grpcPort": 0}
CALL = parsed_request.from_body(
    completions.ENDPOINT, {"model": "m", "prompt": "x"}, request_fields.RequestFields(), most_choices=1
)
END = b"data: [DONE]\n\n"


async def generated(client: Any) -> str:
    async with grpc.aio.insecure_channel(client.grpc) as channel:
        request = inference_pb2.GenerateRequest(model="fake", prompt="x")
        return "".join([event.text async for event in inference_pb2_grpc.InferenceStub(channel).Generate(request)])


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_an_event_may_have_several_lines_of_data_and_other_fields(up: Any, line_end: bytes) -> None:
    lines = [b'data: {"choices":', b"id: 5", b"data:", b'data: [{"text":"w"}]', b":}", b"data: }"]
    garbage = (line_end.join(lines) + 2 * line_end) * 2 + END
    async with fake_engine.engine(garbage=garbage) as engine, up(engine, listen=LISTEN) as client:
        assert await generated(client) == "ww"
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            body = orjson.dumps({"model": "fake", "prompt": "x", "stream": True})
            request = inference_pb2.CallRequest(path="/v1/completions", body=body)
            _, *events = [event async for event in inference_pb2_grpc.InferenceStub(channel).Call(request)]
        assert [orjson.loads(event.body) for event in events] == [{"choices": [{"text": "w"}]}] * 2


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"text":"w"},{"text":"w"}]}\n\n',
        b'data: {"choices":[{"text":"w"}]}\n' + b"a\n" * 20_000 + b"}\n\n",
        b'data: {"choices":[{"text":"w"}]}\n' + b":\n" * 20_000 + b":}\n\n",
    ],
    ids=["choices", "lines", "comments"],
)
async def test_an_event_that_the_request_cannot_have_ends_the_call(up: Any, event: bytes) -> None:
    async with fake_engine.engine(garbage=event + END) as engine, up(engine, listen=LISTEN) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generated(client)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_no_choice_is_read_of_an_event_with_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_inference, "_piece", lambda choice: pytest.fail("it is read"))
    with pytest.raises(error_table.EngineTrouble, match="garbled"):
        list(grpc_inference._pieces(b'data: {"choices":[' + b"{}," * 100_000 + b"{}]}\n\n", CALL))


def test_the_documents_of_a_long_block_have_one_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blank line whose end has another form ends an event for readers, and none for the cut of the stream."""
    one = b'data: {"choices":[{"a":[' + b"[]," * 20_000 + b"[]]}]}\n\r\n"
    assert len(one) < bounded_json.UNCOUNTED_BYTES
    assert list(grpc_inference._pieces(4 * one, CALL)) == [("", "")] * 4
    monkeypatch.setattr(bounded_json, "of_engine", lambda raw: pytest.fail("it is parsed"))
    with pytest.raises(error_table.EngineTrouble, match="garbled"):
        list(grpc_inference._pieces(60 * one, CALL))
