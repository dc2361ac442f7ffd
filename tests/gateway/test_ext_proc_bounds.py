"""What a proxy may send to the picker's port: bounded, and each stream gets its answer. The proxy is a gRPC client."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

import fake_engine
from tidegate_gateway.edge import ext_proc, http_messages
from tidegate_proto.envoy import ext_proc_pb2, ext_proc_pb2_grpc

LISTEN = {"extProcPort": 0}


def head(**more: str) -> ext_proc_pb2.ProcessingRequest:
    sent = ext_proc_pb2.ProcessingRequest()
    headers = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json", **more}
    for name, value in headers.items():
        sent.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return sent


async def first_answer(address: str, sent: ext_proc_pb2.ProcessingRequest) -> ext_proc_pb2.ProcessingResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stream = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        await stream.write(sent)
        return await stream.read()


async def test_a_subset_that_is_too_long_gets_an_answer(up: Any) -> None:
    sent = head()
    hint = sent.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint["x-gateway-destination-endpoint-subset"] = "10.0.0.1:1," * 10_000
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        answer = await first_answer(client.ext_proc, sent)
        assert answer.immediate_response.status.code == 400
        assert b"subset of endpoints" in answer.immediate_response.body


@pytest.mark.parametrize(("name", "status"), [(":path", 404), (":method", 405), ("x-tidegate-tenant", 200)])
async def test_bytes_that_are_no_text_get_an_answer(
    up: Any, caplog: pytest.LogCaptureFixture, name: str, status: int
) -> None:
    sent = head()
    kept = [each for each in sent.request_headers.headers.headers if each.key != name]
    del sent.request_headers.headers.headers[:]
    sent.request_headers.headers.headers.extend(kept)
    sent.request_headers.headers.headers.add(key=name, raw_value=b"/v1/\xff\xed\xb3\xbf")
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        answer = await first_answer(client.ext_proc, sent)
        assert (answer.immediate_response.status.code or 200) == status
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        ({":path": "/v1/models/" + "%2f/a" * 1600}, 414, b"path_too_long"),
        ({":path": "/" + "%41%e9" * 1_000_000}, 414, b"path_too_long"),
        ({":method": "P" * 40_000}, 431, b"headers_too_large"),
        ({"authorization": "Bearer " + "k" * 4_000_000}, 431, b"headers_too_large"),
        ({f"x-{number}": "v" * 4096 for number in range(8)}, 431, b"headers_too_large"),
    ],
    ids=["slashes", "letters", "method", "key", "sum"],
)
async def test_a_head_that_is_too_long_gets_the_answer_of_the_http_port_before_it_is_read(
    up: Any, monkeypatch: pytest.MonkeyPatch, header: dict[str, str], status: int, code: bytes
) -> None:
    async with up(listen=LISTEN) as client:
        monkeypatch.setattr(http_messages.Request, "segments", property(lambda request: pytest.fail("it is decoded")))
        answer = (await first_answer(client.ext_proc, head(**header))).immediate_response
        assert answer.status.code == status
        assert code in answer.body


async def test_a_message_with_too_many_headers_ends_its_stream(up: Any) -> None:
    sent = head()
    for _ in range(ext_proc.MOST_ENTRIES):
        sent.request_headers.headers.headers.add()
    sent.request_headers.headers.headers.add(key="x", raw_value=b"x" * ext_proc.LONG_BYTES)
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN) as client:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await first_answer(client.ext_proc, sent)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "entries" in str(ended.value.details())
        assert (await first_answer(client.ext_proc, head())).WhichOneof("response")


async def test_a_body_out_of_turn_ends_the_call_that_was_placed(up: Any, until: Any) -> None:
    """An Envoy that streams bodies without saying so sends parts, of which the first one is taken for the whole."""
    part = ext_proc_pb2.ProcessingRequest()
    part.request_body.body = b'{"model": "fake", "messages": [{"role": "user", "content": "x"}]}'
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.ext_proc) as channel,
    ):
        stream = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        await stream.write(head())
        assert (await stream.read()).WhichOneof("response") == "request_headers"
        await stream.write(part)
        assert (await stream.read()).WhichOneof("response") == "request_body"
        assert client.own_backlog()
        await stream.write(part)
        with pytest.raises(grpc.aio.AioRpcError, match="out of turn"):
            await stream.read()
        await until(lambda: not client.own_backlog())


@pytest.mark.parametrize("answered", [False, True])
async def test_headers_that_come_twice_end_the_call_that_was_placed(up: Any, until: Any, answered: bool) -> None:
    body, head_of_answer = ext_proc_pb2.ProcessingRequest(), ext_proc_pb2.ProcessingRequest()
    body.request_body.body = b'{"model": "fake", "messages": [{"role": "user", "content": "x"}]}'
    head_of_answer.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.ext_proc) as channel,
    ):
        stream = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        for sent in [head(), body, head_of_answer][: 2 + answered]:
            await stream.write(sent)
            assert (await stream.read()).WhichOneof("response")
        assert client.gateway.placements.in_progress == 1
        await stream.write(head(**{":path": "/nothing"}))
        with pytest.raises(grpc.aio.AioRpcError, match="come twice"):
            await stream.read()
        await until(lambda: not client.gateway.placements.in_progress)


async def test_a_stream_without_a_message_ends(up: Any) -> None:
    async with (
        up(listen=LISTEN, limits={"body": "200ms"}) as client,
        grpc.aio.insecure_channel(client.ext_proc) as channel,
    ):
        stream = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_stream_of_an_answered_request_ends_although_the_proxy_keeps_it_open(
    up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ext_proc, "ANSWERED_S", 0.2)
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.ext_proc) as channel:
        stream = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        await stream.write(head(**{":path": "/nowhere"}))
        assert (await stream.read()).immediate_response.status.code == 404
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_the_streams_of_all_connections_have_one_bound(up: Any) -> None:
    async with up(listen=LISTEN, limits={"connections": 4}) as client, contextlib.AsyncExitStack() as stack:
        streams = []
        for _ in range(3):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(client.ext_proc, options=options))
            await channel.channel_ready()
            streams += [ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process() for _ in range(2)]
        done, _ = await asyncio.wait([asyncio.create_task(stream.code()) for stream in streams], timeout=1)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        for stream in streams:
            stream.cancel()
