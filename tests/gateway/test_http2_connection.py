"""The picker's port speaks gRPC over HTTP/2 with any client, and no bytes break it."""

import asyncio
import contextlib
import pathlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import hpack
import http2_peer
import orjson
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from test_port_encryption import certificate

import fake_engine
from tidegate_gateway.edge import (
    ext_proc_messages,
    http2_frames,
    http2_heads,
)
from tidegate_proto.envoy import ext_proc_pb2, ext_proc_pb2_grpc

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
LISTEN = {"extProcPort": 0}


async def health(channel: grpc.aio.Channel, service: str) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    status: int = answer.status
    return status


async def test_a_grpc_client_reads_the_health(up: Any) -> None:
    async with up(listen=LISTEN) as client, grpc.aio.insecure_channel(client.ext_proc) as channel:
        assert await health(channel, "liveness") == SERVING
        assert await health(channel, "readiness") == NOT_SERVING
        assert await health(channel, "envoy.service.ext_proc.v3.ExternalProcessor") == NOT_SERVING
        assert await health(channel, "other") == UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tidegate.v1.Workflows/Get")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def messages(body: bytes) -> list[ext_proc_pb2.ProcessingRequest]:
    pairs = {":method": "POST", ":path": "/v1/completions", ":authority": "x", "content-type": "application/json"}
    named = [ext_proc_pb2.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs.items()]
    headers = ext_proc_pb2.HttpHeaders(headers=ext_proc_pb2.HeaderMap(headers=named))
    whole = ext_proc_pb2.HttpBody(body=body, end_of_stream=True)
    request = ext_proc_pb2.ProcessingRequest
    return [request(request_headers=headers), request(request_body=whole)]


async def exchanged(channel: grpc.aio.Channel, body: bytes) -> list[ext_proc_pb2.ProcessingResponse]:
    call = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
    answers = []
    for message in messages(body):
        await call.write(message)
        answers.append(await call.read())
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return answers


async def test_large_messages_pass_both_windows(up: Any) -> None:
    body = b'{"model": "fake", "prompt": "%s"}' % (b"0123456789" * 400_000)
    unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.ext_proc, options=unbounded) as channel,
    ):
        for found in await asyncio.gather(*(exchanged(channel, body) for _ in range(8))):
            assert found[0].HasField("request_headers")
            changed = found[1].request_body.response
            assert b"0123456789" * 400_000 in changed.body_mutation.body
            chosen = found[1].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
            headers = {option.header.key: option.header.raw_value for option in changed.header_mutation.set_headers}
            assert headers["x-gateway-destination-endpoint"].decode() == chosen == engine.url.removeprefix("http://")
        assert not client.own_backlog()


async def test_a_call_that_is_held_for_an_engine_asks_for_the_time_that_it_is_held(up: Any) -> None:
    queue = {"hold": "60s", "ttl": "1s"}
    async with up(listen=LISTEN, queue=queue) as client, grpc.aio.insecure_channel(client.ext_proc) as channel:
        call = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        for message in messages(b'{"model": "fake", "prompt": "x"}'):
            await call.write(message)
        assert (await call.read()).HasField("request_headers")
        assert (await call.read()).override_message_timeout.ToTimedelta().total_seconds() > 60
        call.cancel()


@pytest.mark.parametrize("trailers", [False, True])
async def test_a_body_in_parts_is_answered_in_order(up: Any, trailers: bool) -> None:
    head, body = messages(b'{"model": "fake", "prompt": "%s"}' % (b"0123456789" * 20_000))
    head.protocol_config.request_body_mode = ext_proc_pb2.FULL_DUPLEX_STREAMED
    text = body.request_body.body
    parts = [text[start : start + 30_000] for start in range(0, len(text), 30_000)]
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.ext_proc) as channel,
    ):
        call = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        await call.write(head)
        for part in parts:
            last = part is parts[-1] and not trailers
            whole = ext_proc_pb2.HttpBody(body=part, end_of_stream=last)
            await call.write(ext_proc_pb2.ProcessingRequest(request_body=whole))
        if trailers:
            await call.write(ext_proc_pb2.ProcessingRequest(request_trailers=ext_proc_pb2.HttpTrailers()))
        assert (await call.read()).HasField("request_headers")
        found, ends = b"", []
        while b"vllm_xargs" not in found or len(found) % ext_proc_messages.CHUNK_BYTES == 0:
            part = (await call.read()).request_body.response.body_mutation.streamed_response
            found += part.body
            ends.append(part.end_of_stream)
        assert ends == [False] * (len(ends) - 1) + [not trailers]
        assert orjson.loads(found)["prompt"] == "0123456789" * 20_000
        if trailers:
            assert (await call.read()).HasField("request_trailers")
        call.cancel()


async def test_the_port_speaks_tls(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    async with fake_engine.engine() as engine, up(engine, listen=LISTEN, tls=tls) as client:
        trusted = grpc.ssl_channel_credentials(await asyncio.to_thread(pathlib.Path(tls["certFile"]).read_bytes))
        async with grpc.aio.secure_channel(client.ext_proc, trusted) as channel:
            assert await health(channel, "readiness") == SERVING


async def test_a_message_out_of_turn_ends_its_stream_only(up: Any) -> None:
    head, body = messages(b"{}")
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.ext_proc) as channel,
    ):
        stub = ext_proc_pb2_grpc.ExternalProcessorStub(channel)
        raw = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        for first in (body.SerializeToString(), b"\xff\xff\xff", b""):
            call = raw()
            await call.write(first)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = stub.Process()
        await call.write(head)
        await call.write(body)
        assert (await call.read()).HasField("request_headers")
        assert (await call.read()).immediate_response.status.code == 400
        call.cancel()
        assert await health(channel, "readiness") == SERVING


@contextlib.asynccontextmanager
async def connected(client: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = client.ext_proc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        http2_frames.PREFACE + b"\x00\xff\xff\x00\x00\x00\x00\x00\x01",
        http2_frames.PREFACE + http2_frames.frame(http2_frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        http2_frames.PREFACE + http2_frames.frame(http2_frames.HEADERS, 4, 2, b"\x82"),
        http2_frames.PREFACE + http2_frames.frame(http2_frames.DATA, 0, 7, b"x"),
        http2_frames.PREFACE + http2_frames.frame(http2_frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
        http2_frames.PREFACE + http2_frames.frame(http2_frames.CONTINUATION, 4, 1, b"x"),
        http2_frames.PREFACE + http2_frames.frame(http2_frames.HEADERS, 0, 1) * 2,
        http2_frames.PREFACE
        + http2_frames.frame(http2_frames.HEADERS, 0, 1)
        + http2_frames.frame(http2_frames.CONTINUATION, 0, 1, b"\x82" * 16_000) * 5,
    ],
)
async def test_bytes_that_are_no_protocol_end_the_connection(up: Any, sent: bytes) -> None:
    async with up(listen=LISTEN) as client:
        async with connected(client) as (reader, writer):
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer[-17:-8] == http2_frames.frame(http2_frames.GOAWAY, 0, 0, bytes(8))[:9]
        async with grpc.aio.insecure_channel(client.ext_proc) as channel:
            assert await health(channel, "liveness") == SERVING


async def test_equal_heads_are_read_anew_when_the_table_of_the_decoder_has_changed() -> None:
    decoder = http2_heads.HeadDecoder()
    encoder = hpack.Encoder()
    first = encoder.encode([(":path", "/first")])  # the table holds it from here on
    assert decoder.head(first).path == "/first"
    same = encoder.encode([(":path", "/first")])
    assert [decoder.head(same).path for _ in range(3)] == ["/first"] * 3
    second = encoder.encode([(":path", "/second")])
    assert decoder.head(second).path == "/second"
    assert decoder.head(same).path == "/second", "the same bytes name the newest entry of the table"


@given(data=st.lists(st.binary(max_size=60)), begins=st.booleans())
async def test_any_bytes_are_answered_or_end_the_connection(data: list[bytes], begins: bool) -> None:
    made, _ = http2_peer.connection()
    made.data_received(http2_frames.PREFACE if begins else b"")
    for piece in data:
        made.data_received(piece)
    made.connection_lost(None)


frames = st.builds(
    http2_frames.frame, st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40)
)


@given(sent=st.lists(frames, max_size=12))
async def test_any_frames_are_answered_or_end_the_connection(sent: list[bytes]) -> None:
    made, _ = http2_peer.connection()
    made.data_received(http2_frames.PREFACE + b"".join(sent))
    made.connection_lost(None)


@given(
    texts=st.lists(st.binary(max_size=40_000), max_size=4),
    cuts=st.lists(st.integers(1, 5_000), max_size=20),
    window=st.integers(1, 70_000),
    more=st.integers(1, 20_000),
)
async def test_messages_come_back_whole_however_they_are_cut(
    texts: list[bytes], cuts: list[int], window: int, more: int
) -> None:
    """The peer's window is small, and it opens by `more` whenever nothing comes."""
    made, transport = http2_peer.connection()
    frame = http2_frames.frame
    settings = struct.pack(">HI", http2_frames.INITIAL_WINDOW_SIZE, window)
    block = hpack.Encoder().encode([(":method", "POST"), (":path", "/echo"), ("content-type", "application/grpc")])
    payload = b"".join(b"\0" + len(text).to_bytes(4) + text for text in texts)
    parts = [payload[start : start + 16_384] for start in range(0, len(payload), 16_384)]
    sent = frame(http2_frames.SETTINGS, 0, 0, settings) + frame(http2_frames.HEADERS, 4, 1, block)
    sent += b"".join(frame(http2_frames.DATA, 0, 1, part) for part in parts)
    sent = http2_frames.PREFACE + sent + frame(http2_frames.DATA, http2_frames.END_STREAM, 1)
    at = 0
    for size in [*cuts, len(sent)]:
        made.data_received(sent[at : at + size])
        at += size
    for _ in range(200_000):
        if echoed(transport.written)[1]:
            break
        for stream in (0, 1):
            made.data_received(frame(http2_frames.WINDOW_UPDATE, 0, stream, more.to_bytes(4)))
    assert echoed(transport.written) == (payload, True)
    assert not transport.closed


def echoed(written: bytes) -> tuple[bytes, bool]:
    """The data that came back, and whether the stream ended."""
    data, ended, at = b"", False, 0
    while at < len(written):
        size, kind, flags = int.from_bytes(written[at : at + 3]), written[at + 3], written[at + 4]
        payload = written[at + 9 : at + 9 + size]
        data += payload if kind == http2_frames.DATA else b""
        ended |= kind == http2_frames.HEADERS and bool(flags & http2_frames.END_STREAM)
        at += 9 + size
    return data, ended
