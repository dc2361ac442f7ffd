"""`Call` over gRPC: the JSON of every OpenAI endpoint passes as it is, streamed and not."""

from typing import Any

import grpc
import orjson
import pytest

import fake_engine
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

LISTEN = {"grpcPort": 0}
HELLO = [{"role": "user", "content": "hi"}]


async def answers(client: Any, path: str, document: dict[str, Any], **fields: Any) -> tuple[Any, list[Any]]:
    """The first message, and the JSON of the others."""
    async with grpc.aio.insecure_channel(client.grpc) as channel:
        request = inference_pb2.CallRequest(path=path, body=orjson.dumps({"model": "fake", **document}), **fields)
        first, *rest = [event async for event in inference_pb2_grpc.InferenceStub(channel).Call(request)]
    return first.accepted, [orjson.loads(event.body) for event in rest]


async def test_a_whole_answer_is_one_message(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        accepted, (chat,) = await answers(client, "/v1/chat/completions", {"messages": HELLO}, request_id="mine")
        assert (accepted.request_id, accepted.engine) == ("mine", engine.url.removeprefix("http://"))
        assert chat["choices"][0]["message"]["content"] == "w0 w1 w2 w3 "
        _, (vectors,) = await answers(client, "/v1/embeddings", {"input": ["a", "b"]})
        assert [item["index"] for item in vectors["data"]] == [0, 1]
        _, (response,) = await answers(client, "/v1/responses", {"input": "hi"}, tenant="acme")
        assert response["output"][0]["content"][0]["text"] == "w0 w1 w2 w3 "
        assert engine.bodies[-1]["vllm_xargs"]["tg.tenant"] == "acme"


async def test_a_streamed_answer_has_one_message_for_each_event(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        _, events = await answers(client, "/v1/completions", {"prompt": "x", **usage})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "w0 w1 w2 w3 "
        assert events[-1]["usage"]["completion_tokens"] == 4
        _, events = await answers(client, "/v1/responses", {"input": "x", "stream": True})
        assert [event["type"] for event in events][::5] == ["response.created", "response.completed"]


async def test_tools_logprobs_structured_output_and_unknown_fields_reach_the_engine_as_they_are(up: Any) -> None:
    fields = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "x_unknown": [1, {"a": None}],
    }
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        await answers(client, "/v1/chat/completions", {"messages": HELLO, **fields})
        assert {name: engine.bodies[0][name] for name in fields} == fields


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/files", b"{}", grpc.StatusCode.INVALID_ARGUMENT),
        ("/v1/chat/completions", b"{", grpc.StatusCode.INVALID_ARGUMENT),
        ("/v1/chat/completions", b'{"model": "nope", "messages": [{"role": "user"}]}', grpc.StatusCode.NOT_FOUND),
        ("/v1/responses", b'{"model": "fake", "input": "x", "background": true}', grpc.StatusCode.INVALID_ARGUMENT),
        ("/v1/embeddings", b'{"model": "fake", "input": "x", "stream": true}', grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_wrong_calls_have_the_code_that_http_has(up: Any, path: str, body: bytes, code: grpc.StatusCode) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Call(inference_pb2.CallRequest(path=path, body=body)).read()
        assert caught.value.code() is code
        assert not engine.bodies


async def test_an_engines_rejection_and_a_broken_stream_are_errors(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up(engine, listen=LISTEN) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="as set by the test"):
            await answers(client, "/v1/chat/completions", {"messages": HELLO})
        engine.status, engine.break_after = 200, 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(client, "/v1/completions", {"prompt": "x", "stream": True})
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
