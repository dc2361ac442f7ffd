"""Messages of gRPC are bounded before they are decoded."""

import asyncio
import contextlib
import threading
from typing import Any

import grpc
import orjson
import pytest
from google.protobuf import message, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

import fake_engine
from tidegate_gateway.edge import grpc_messages, message_entries
from tidegate_gateway.openai import escaped_text
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

LISTEN = {"grpcPort": 0}
GENERATE = message_entries.nested(inference_pb2.GenerateRequest.DESCRIPTOR)
MANY = grpc_messages.MOST_ENTRIES["GenerateRequest"] + 1


def conversation(texts: list[tuple[str, str]]) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.Message(role=role, content=content) for role, content in texts]
    return inference_pb2.GenerateRequest(model="fake", messages=inference_pb2.Messages(messages=messages))


def varint(number: int) -> bytes:
    found = b""
    while number >= 0x80:
        found, number = found + bytes([number & 0x7F | 0x80]), number >> 7
    return found + bytes([number])


@given(texts=st.lists(st.tuples(st.text(), st.text(min_size=200)), max_size=5), stops=st.lists(st.text(), max_size=5))
def test_the_entries_of_a_message_are_all_counted(texts: list[tuple[str, str]], stops: list[str]) -> None:
    request = conversation(texts)
    request.stop.extend(stops)
    request.seed = -1
    request.temperature = 0.5
    fields = len(stops) + len(request.ListFields()) - bool(stops)
    entries = fields + sum(1 + bool(role) + bool(content) for role, content in texts)
    raw = request.SerializeToString()
    assert message_entries.count(raw, GENERATE, entries) == entries
    with pytest.raises(BadRequest, match="entries"):
        message_entries.count(raw, GENERATE, entries - 1)


@given(texts=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=3), cut=st.integers(1, 5))
def test_whatever_is_counted_is_what_protobuf_reads(texts: list[tuple[str, str]], cut: int) -> None:
    raw = conversation(texts).SerializeToString()[:-cut]
    try:
        inference_pb2.GenerateRequest.FromString(raw)
    except message.DecodeError:
        with pytest.raises(message.DecodeError):
            message_entries.count(raw, GENERATE, MANY - 1)
    else:
        message_entries.count(raw, GENERATE, MANY - 1)


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_counted_or_no_message(raw: bytes) -> None:
    with contextlib.suppress(message.DecodeError):
        message_entries.count(raw, GENERATE, MANY - 1)


def test_items_of_maps_count_where_they_are_asked_for_and_a_kind_may_contain_itself() -> None:
    kind = message_entries.nested(struct_pb2.Struct.DESCRIPTOR, maps=True)
    made = struct_pb2.Struct()
    made.update({"a": [1, 2, 3]})
    raw = made.SerializeToString()
    # an item, its key, its value, the list of this, and three numbers in it
    assert message_entries.count(raw, kind, 10) == 1 + 1 + 1 + 1 + 3 + 3
    with pytest.raises(BadRequest, match="more than 5 entries"):
        message_entries.count(raw, kind, 5)
    deep = b""
    for _ in range(200):
        value = b"\x32" + varint(len(deep)) + deep  # a value that is a list
        deep = b"\x0a" + varint(len(value)) + value  # the item of another list
    with pytest.raises(message.DecodeError, match="100 times"):
        message_entries.count(deep, message_entries.nested(struct_pb2.ListValue.DESCRIPTOR, maps=True), 10_000)


@pytest.mark.parametrize("kind", ["messages", "texts to stop at"])
async def test_a_message_of_many_empty_entries_is_an_invalid_argument(up: Any, kind: str) -> None:
    request = inference_pb2.GenerateRequest(model="fake", prompt="x")
    if kind == "messages":
        request.messages.messages.extend([inference_pb2.Message()] * MANY)
    else:
        request.stop.extend([""] * MANY)
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="entries") as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not engine.bodies


async def test_the_messages_of_all_calls_have_one_bound(up: Any, until: Any) -> None:
    """Those of HTTP are among them."""
    limits = {"bodiesBytes": 100_000}
    request = inference_pb2.GenerateRequest(model="fake", prompt="x" * 60_000)
    async with (
        fake_engine.engine(tokens=10_000, token_s=0.01) as engine,
        up(engine, listen=LISTEN, limits=limits) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        first = stub.Generate(request)
        assert (await first.read()).accepted.engine
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status, answer, _ = await client.ask(user="x" * 40_000)
        assert (status, answer["error"]["code"]) == (429, "saturated")
        first.cancel()
        await until(lambda: engine.running == 0)

        async def has_room() -> bool:
            again = stub.Generate(request)
            try:
                return bool((await again.read()).accepted.engine)
            except grpc.aio.AioRpcError:
                return False
            finally:
                again.cancel()
                await asyncio.sleep(0)

        await until(has_room)


@given(text=st.text(alphabet=st.characters(max_codepoint=0x2030, exclude_categories=["Cs"])))
def test_the_bytes_of_a_text_as_json_are_counted(text: str) -> None:
    assert escaped_text.json_bytes(text) == len(orjson.dumps(text)) - 2


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize(("character", "size"), [("\x01", 6), ('"', 2)])
@pytest.mark.parametrize("length", [60_000, 600_000])
async def test_a_message_has_the_bound_of_a_body_as_json(
    up: Any, length: int, character: str, size: int, compression: grpc.Compression
) -> None:
    fits, large = character * (length // size - 100), character * (length // size)
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN, limits={"bodyBytes": length}) as client,
        grpc.aio.insecure_channel(client.grpc, compression=compression) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        async for _ in stub.Generate(inference_pb2.GenerateRequest(model="fake", prompt=fits)):
            pass
        for request in (
            inference_pb2.GenerateRequest(model="fake", prompt=large),
            inference_pb2.GenerateRequest(model=large, prompt="x"),
            conversation([("user", large)]),
            conversation([(large, "x")]),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="with its control characters") as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [body["prompt"] for body in engine.bodies] == [fits]


@pytest.mark.parametrize("length", [3000, 60_000])
async def test_a_message_counts_with_the_bytes_of_its_texts_as_json(up: Any, until: Any, length: int) -> None:
    async with (
        fake_engine.engine(tokens=10_000, token_s=0.01) as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(conversation([("user", "\x01" * length)]))
        assert (await call.read()).accepted.engine
        assert client.gateway.bodies.used >= 6 * length
        call.cancel()
        await until(lambda: client.gateway.bodies.used == 0)


async def test_a_call_that_is_cancelled_while_its_message_is_decoded_counts_until_the_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch, up: Any, until: Any
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    decode = grpc_messages.Messages._decode
    most_at_once, at_once = 0, 0

    def slow(*arguments: Any) -> Any:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        begun.release()
        may_end.wait(30)
        at_once -= 1
        return decode(*arguments)

    monkeypatch.setattr(grpc_messages.Messages, "_decode", slow)
    request = inference_pb2.GenerateRequest(model="fake", prompt="x" * 60_000)
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN, limits={"bodiesBytes": 130_000}) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        first, second = stub.Generate(request), stub.Generate(request)
        await asyncio.to_thread(begun.acquire)
        first.cancel()
        second.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(model="fake", prompt="x" * 100_000)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        may_end.set()

        async def has_room() -> bool:
            try:
                return bool((await stub.Generate(request).read()).accepted.engine)
            except grpc.aio.AioRpcError:
                return False

        await until(has_room)
    assert most_at_once == 1
