"""What one client of the gRPC port costs the others: frames that it sends, and answers that it does not read."""

import asyncio
import contextlib
import gc
import gzip
import hashlib
import pathlib
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc_peer
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

import fake_engine
from tidegate_gateway import loop_steps
from tidegate_gateway.edge import grpc_api, grpc_call, http2_connection, http2_frames, http2_server, unread_answers
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

LISTEN = {"grpcPort": 0}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EMPTY = grpc_peer.message(b"")
OF_A, OF_B = ("x-tidegate-tenant", "a"), ("x-tidegate-tenant", "b")


def generate(prompt: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(model="fake", prompt=prompt)


def part_of(size: int) -> bytes:
    """A message of `size` bytes, without the last one."""
    return grpc_peer.message(bytes(size))[:-1]


async def checked(peer: grpc_peer.Peer, *headers: tuple[str, str]) -> str:
    """The status of a health check."""
    answer = await peer.ended(peer.open(grpc_peer.CHECK, *headers, message=EMPTY, ends=True))
    return answer.head["grpc-status"]


@pytest.fixture
def keys(tmp_path: pathlib.Path) -> dict[str, Any]:
    entries = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in ("a", "b")]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": entries}))
    return {"auth": {"keysFile": str(path)}}


async def test_a_call_without_a_key_ends_before_its_message_comes(up: Any, keys: dict[str, Any]) -> None:
    async with up(listen=LISTEN, **keys) as client, grpc_peer.connected(client.grpc) as peer:
        answer = await peer.ended(peer.open(grpc_peer.GENERATE))
        assert (answer.head["grpc-status"], answer.head["grpc-message"][:7]) == ("16", "send th")
        assert await checked(peer) == "0", "the connection goes on, and health needs no key"


@pytest.mark.parametrize("path", [grpc_peer.GENERATE, grpc_peer.CHECK])
async def test_a_message_that_does_not_arrive_in_time_ends_its_call(up: Any, path: str) -> None:
    async with up(listen=LISTEN, limits={"body": "200ms"}) as client, grpc_peer.connected(client.grpc) as peer:
        answer = await peer.ended(peer.open(path, message=part_of(5000)))
        assert answer.head["grpc-message"] == "the message did not arrive within 0.2 s"
        assert await checked(peer) == "0"


@pytest.mark.parametrize("with_keys", [False, True])
async def test_the_messages_that_arrive_from_one_tenant_leave_room_for_another(
    up: Any, until: Any, keys: dict[str, Any], with_keys: bool
) -> None:
    limits = {"bodiesBytes": 300_000, "bodyBytes": 100_000}
    of_a, of_b = (("authorization", f"Bearer {name}") if with_keys else tenant for name, tenant in
                  (("a", OF_A), ("b", OF_B)))  # fmt: skip
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN, limits=limits, **(keys if with_keys else {})) as client,
        grpc_peer.connected(client.grpc, window=1 << 20) as attacker,
        grpc_peer.connected(client.grpc) as other,
    ):
        numbers = [attacker.open(grpc_peer.GENERATE, of_a, message=part_of(60_000)) for _ in range(6)]
        for number in numbers[3:]:
            assert (await attacker.ended(number)).head["grpc-status"] == "8"
        assert not any(attacker.answers[number].is_whole for number in numbers[:3])
        whole = grpc_peer.message(generate("x" * 50_000).SerializeToString())
        answer = await other.ended(other.open(grpc_peer.GENERATE, of_b, message=whole, ends=True))
        assert answer.head["grpc-status"] == "0"


async def test_a_tenant_has_a_bound_of_calls_and_leaves_room_for_another(up: Any, keys: dict[str, Any]) -> None:
    async with (
        up(listen=LISTEN, limits={"connections": 9}, **keys) as client,
        grpc_peer.connected(client.grpc) as attacker,
        grpc_peer.connected(client.grpc) as other,
    ):
        numbers = [attacker.open(grpc_peer.WATCH, (*OF_A[:1], str(index)), message=EMPTY) for index in range(8)]
        for number in numbers[6:]:  # without a key all names are one tenant
            assert (await attacker.ended(number)).head["grpc-status"] == "8"
        assert not any(attacker.answers[number].is_whole for number in numbers[:6])
        answer = await other.ended(other.open(grpc_peer.GENERATE, ("authorization", "Bearer b"), ends=True))
        assert answer.head["grpc-message"] == "the call ended before its message had come"


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_messages_may_be_compressed(up: Any, compression: grpc.Compression) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc.aio.insecure_channel(client.grpc, compression=compression) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        for prompt in ("x" * 1000, "y" * 1_000_000):
            async for _ in stub.Generate(generate(prompt)):
                pass
            assert engine.bodies[-1]["prompt"] == prompt


@pytest.mark.parametrize(
    ("encoding", "raw", "code", "told"),
    [
        ("deflate", zlib.compress(bytes(2_000_000)), "8", "a message has at most 1000000 bytes"),
        ("deflate", zlib.compress(generate("x").SerializeToString())[:-3], "3", "these bytes are not the message"),
        ("gzip", b"not compressed", "3", "these bytes are not the message"),
        ("br", b"x", "12", "a message is compressed by gzip, deflate or not at all"),
        ("", b"x", "13", "a message is compressed by gzip, deflate or not at all"),
    ],
)
async def test_compressed_messages_have_the_bound_of_others(
    up: Any, encoding: str, raw: bytes, code: str, told: str
) -> None:
    sent = grpc_peer.message(raw, compressed=True)
    headers = [("grpc-encoding", encoding)] if encoding else []
    async with up(listen=LISTEN, limits={"bodyBytes": 1_000_000}) as client, grpc_peer.connected(client.grpc) as peer:
        answer = await peer.ended(peer.open(grpc_peer.GENERATE, *headers, message=sent, ends=True))
        assert (answer.head["grpc-status"], answer.head["grpc-message"][: len(told)]) == (code, told)


async def test_each_message_of_a_stream_may_be_compressed_or_not(up: Any) -> None:
    compressions = [gzip.compress, bytes, gzip.compress, gzip.compress, bytes]
    requests = [reflection_pb2.ServerReflectionRequest(list_services=str(number)) for number in range(5)]
    async with up(listen=LISTEN) as client, grpc_peer.connected(client.grpc) as peer:
        number = peer.open(REFLECTION, ("grpc-encoding", "gzip"))
        for compress, request in zip(compressions, requests, strict=True):
            raw = compress(request.SerializeToString())
            peer.send(number, grpc_peer.message(raw, compressed=compress is not bytes))
        peer.send(number, b"", ends=True)
        answer = await peer.ended(number)
        assert answer.head["grpc-status"] == "0"
        answers, left = [], answer.data
        while left:
            size = 5 + int.from_bytes(left[1:5])
            answers.append(reflection_pb2.ServerReflectionResponse.FromString(left[5:size]))
            left = left[size:]
        assert [each.original_request for each in answers] == requests
        assert all(each.list_services_response.service for each in answers)


async def test_the_deadline_of_a_client_ends_its_call_and_the_engine_stops(up: Any, until: Any) -> None:
    async with (
        fake_engine.engine(first_s=60) as engine,
        up(engine, listen=LISTEN) as client,
        grpc_peer.connected(client.grpc) as peer,
    ):
        whole = grpc_peer.message(generate("x").SerializeToString())
        headers = [[("grpc-timeout", "30S")], [("grpc-timeout", "soon")], [("grpc-timeout", "900m")]]
        numbers = [peer.open(grpc_peer.GENERATE, *given, message=whole, ends=True) for given in headers]
        await until(lambda: engine.running == 3)
        assert (await peer.ended(numbers[2])).head["grpc-status"] == "4"
        await until(lambda: engine.running == 2)
        assert [peer.answers[number].is_whole for number in numbers] == [False, False, True]


async def test_those_who_watch_the_health_are_told_of_changes_and_hold_up_nobody(up: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN, limits={"write": "200ms"}) as client,
        grpc_peer.connected(client.grpc, window=0) as unread,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        number = unread.open(grpc_peer.WATCH, message=EMPTY)
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await states.read()).status == health_pb2.HealthCheckResponse.SERVING
        engine.healthy = False
        assert (await states.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        answer = await unread.ended(number)
        assert (answer.head["grpc-message"], answer.data) == ("the answer was not read within 0.2 s", b"")


async def test_answers_that_are_not_read_have_a_bound_in_sum(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = (100_000, 100_000, unread_answers.time.monotonic)
    monkeypatch.setattr(unread_answers.UnreadAnswers.__init__, "__defaults__", bounds)
    monkeypatch.setattr(unread_answers, "LONG_BYTES", 1000)
    path = "/tidegate.v1.Workflows/List"
    whole = grpc_peer.message(inference_pb2.ListWorkflowsRequest(limit=1000).SerializeToString())
    async with up(listen=LISTEN) as client, contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(client.grpc))
        stub = inference_pb2_grpc.WorkflowsStub(channel)
        for number in range(200):
            await stub.Create(inference_pb2.CreateWorkflowRequest(id=f"w{number}", deadline_ms=60_000))
        answer = await stub.List(inference_pb2.ListWorkflowsRequest(limit=1000))
        size = answer.ByteSize() + 5
        assert len(answer.workflows) == 200
        peers = []
        for _ in range(100_000 // size + 2):
            peers.append(await stack.enter_async_context(grpc_peer.connected(client.grpc, window=0)))
            peers[-1].open(path, message=whole, ends=True)
            await peers[-1].read()
            assert await checked_through(channel)
        assert await peers[0].is_cut()
        assert not await peers[-1].is_cut(within_s=0.2)


async def checked_through(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return bool(answer.status)


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(up: Any, until: Any) -> None:
    event = b'data: {"choices":[{"text":"' + b"x" * 4000 + b'"}]}\n\n'
    most = http2_connection.MOST_WINDOW_BYTES
    async with (
        fake_engine.engine(garbage=event * 8000 + b"data: [DONE]\n\n") as engine,
        up(engine, listen=LISTEN, limits={"write": "200ms"}) as client,
        grpc_peer.connected(client.grpc, window=most) as peer,
    ):
        more = most - http2_connection.FIRST_WINDOW_BYTES
        peer.writer.write(http2_frames.frame(http2_frames.WINDOW_UPDATE, 0, 0, more.to_bytes(4)))
        peer.open(grpc_peer.GENERATE, message=grpc_peer.message(generate("x").SerializeToString()), ends=True)
        await until(lambda: engine.bodies and not client.gateway.placements.in_progress)
        assert await peer.is_cut()


async def test_connections_without_calls_end_after_a_while(up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_api, "IDLE_S", 0.3)
    monkeypatch.setattr(http2_server, "LOOK_S", 0.05)
    async with (
        up(listen=LISTEN, limits={"idle": "200ms"}) as client,
        grpc_peer.connected(client.grpc) as idle,
        grpc_peer.connected(client.grpc) as busy,
    ):
        host, _, port = client.grpc.rpartition(":")
        reader, silent = await asyncio.open_connection(host, int(port))
        busy.open(grpc_peer.WATCH, message=EMPTY)
        assert await checked(idle) == "0"
        assert await idle.is_cut()
        async with asyncio.timeout(20):
            await reader.read()  # the greeting, and the end
        silent.close()
        assert not await busy.is_cut(within_s=0.5)


async def test_a_call_that_goes_on_to_send_messages_is_bounded(up: Any) -> None:
    async with up(listen=LISTEN) as client, grpc_peer.connected(client.grpc, window=0) as peer:
        answer = await peer.ended(peer.open(REFLECTION, message=EMPTY * 1100))
        assert answer.head["grpc-message"] == "the call has too many messages"


async def test_the_calls_of_a_port_that_closes_are_told(up: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with up(listen=LISTEN) as client:
            peer = await stack.enter_async_context(grpc_peer.connected(client.grpc))
            number = peer.open(grpc_peer.WATCH, message=EMPTY)
            while not peer.answers[number].data:
                await peer.read()
            ended = asyncio.create_task(peer.ended(number))
        answer = await ended
        assert (answer.head["grpc-status"], answer.head["grpc-message"]) == ("14", "the gateway ends")


async def test_a_call_that_its_client_gives_up_counts_until_its_task_ends(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, steps = list[grpc_call.Call](), list[Callable[[], object]]()
    begin = grpc_call.Call._begin
    monkeypatch.setattr(grpc_call.Call, "_begin", lambda call: (made.append(call), begin(call)))
    monkeypatch.setattr(loop_steps.Endings, "end", lambda _, step: steps.append(step))
    async with fake_engine.engine(first_s=60) as engine, up(engine, listen=LISTEN) as client:
        async with grpc_peer.connected(client.grpc) as peer:
            peer.open(grpc_peer.GENERATE, message=grpc_peer.message(generate("x").SerializeToString()), ends=True)
            await until(lambda: engine.running == 1)
        budget = made[0]._calls.budget
        await until(lambda: steps)
        assert budget.used == 1, "clients that give up calls faster than they end are refused"
        for step in steps:
            step()
        assert budget.used == 0


@pytest.mark.parametrize("path", [grpc_peer.GENERATE, grpc_peer.WATCH, REFLECTION])
async def test_a_call_that_is_cut_before_the_first_step_of_its_task_is_told_and_leaves_nothing(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    receive, cut = grpc_call.Call.on_message, list[grpc_call.Call]()

    def on_message(self: grpc_call.Call, message_bytes: bytes) -> None:
        receive(self, message_bytes)
        cut.append(self)
        assert self in self._calls.running
        self.cut()

    monkeypatch.setattr(grpc_call.Call, "on_message", on_message)
    async with (
        fake_engine.engine() as engine,
        up(engine, listen=LISTEN) as client,
        grpc_peer.connected(client.grpc) as peer,
    ):
        whole = grpc_peer.message(generate("x").SerializeToString())
        answer = await peer.ended(peer.open(path, ("grpc-timeout", "1H"), message=whole))
        assert (answer.head["grpc-status"], answer.head["grpc-message"]) == ("14", "the gateway ends")
        monkeypatch.undo()
        calls, task, call = cut[0]._calls, cut[0]._task, weakref.ref(cut[0])
        assert task is not None
        await until(task.done)
        assert task.cancelled()
        assert not calls.running
        assert (calls.budget.used, calls.open_budget.used, calls.messages._bodies.used) == (0, 0, 0)
        cut.clear()
        del task
        gc.collect()
        assert call() is None, "no timer keeps it"
        assert await checked(peer) == "0"
        assert not engine.bodies


async def test_a_connection_whose_calls_have_no_key_is_cut_soon(up: Any, keys: dict[str, Any]) -> None:
    async with up(store=False, listen={"grpcPort": 0}, **keys) as client:
        async with grpc_peer.connected(client.grpc) as peer:
            for _ in range(2000):
                number = peer.open(grpc_peer.GENERATE)
                peer.writer.write(http2_frames.frame(http2_frames.RST_STREAM, 0, number, (8).to_bytes(4)))
            assert await peer.is_cut()
        async with grpc_peer.connected(client.grpc) as peer:
            for _ in range(30):
                found = await peer.ended(peer.open(grpc_peer.GENERATE))
                assert found.head["grpc-status"] == "16"
