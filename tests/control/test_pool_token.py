"""The token of a pool at EngineControl: on real sockets, with the server that engines run."""

import asyncio
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import control_double
from tidegate_control import control_client, control_connections, control_contract, control_server, pool_token

TOKEN = "a-token-of-the-pool"
ADDRESS = "unix:@tidegate-pool-token-test"


@pytest.fixture
def serve() -> Iterator[Callable[[str | None], None]]:
    stops: list[Callable[[], None]] = []

    def start(token: str | None) -> None:
        engine = control_contract.Fallback("no hook", policy="priority")
        stops.append(control_server.serve(engine, address=ADDRESS, engine_version="1", token=token).stop)

    yield start
    for stop in stops:
        stop()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (None, "UNAUTHENTICATED: this port requires the token of the pool"),
        (TOKEN + "x", "UNAUTHENTICATED: the token of the call is not the token of this pool"),
        ("b" * len(TOKEN), "UNAUTHENTICATED: the token of the call is not the token of this pool"),
    ],
)
async def test_a_call_without_the_token_of_the_pool_is_rejected(
    serve: Callable[[str | None], None], given: str | None, problem: str
) -> None:
    serve(TOKEN)
    client = control_client.EngineClient(ADDRESS, token=given)
    try:
        with pytest.raises(control_client.CallFailed) as of_state:
            await client.get_state(timeout_s=5.0)
        with pytest.raises(control_client.CallFailed) as of_policy:
            await client.set_policy("edf", "a test")
        with pytest.raises(control_client.CallFailed) as of_watch:
            await anext(client.watch(0.1))
    finally:
        await client.close()
    assert [str(failed.value) for failed in (of_state, of_policy, of_watch)] == [problem] * 3
    assert of_state.value.is_unauthenticated
    assert not of_state.value.is_unreachable


@pytest.mark.parametrize("required", [TOKEN, None])
async def test_a_call_with_the_token_reaches_engines_that_require_it_and_older_engines(
    serve: Callable[[str | None], None], required: str | None
) -> None:
    serve(required)
    client = control_client.EngineClient(ADDRESS, token=TOKEN)
    try:
        state = await client.get_state(timeout_s=5.0)
        assert state is not None
        assert state.fallback_reason == "no hook"
        with pytest.raises(control_client.CallFailed, match="FAILED_PRECONDITION"):
            await client.set_policy("edf", "a test")
    finally:
        await client.close()


async def test_health_needs_no_token_and_the_list_of_services_does(serve: Callable[[str | None], None]) -> None:
    serve(TOKEN)
    async with grpc.aio.insecure_channel(ADDRESS) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await anext(aiter(stub.ServerReflectionInfo(iter([asked]))))


async def test_connections_name_the_engines_that_reject_the_token_and_the_answer() -> None:
    engine = control_double.FakeEngine()
    engine.token, engine.report = TOKEN, control_double.calm()
    await engine.start()
    pace = control_connections.ReportPace(0.1, 0.1)
    wrong = control_connections.EngineConnections(pace=pace, token="another-token-than-that")
    right = control_connections.EngineConnections(pace=pace, token=TOKEN)
    try:
        for connections in (wrong, right):
            await connections.retarget([engine.address])
        async with asyncio.timeout(30):
            while not (wrong.rejections() and right.reported()):
                await asyncio.sleep(0.02)
        message = "UNAUTHENTICATED: the token of the call is not the token of this pool"
        assert wrong.rejections() == {engine.address: message}
        assert right.rejections() == {}
        assert await wrong.put_in_force("edf", "a test", {}, {}) == {engine.address: message}
        assert await right.put_in_force("edf", "a test", {}, {}) == {}
    finally:
        await wrong.close()
        await right.close()
        await engine.stop()


@pytest.mark.parametrize(
    "text", ["", "short", "with a space in its middle", "fifteen-letters", "umlaut-\u00e4-umlaut-x"]
)
def test_a_token_that_is_short_or_has_other_characters_is_an_error_that_does_not_repeat_it(text: str) -> None:
    with pytest.raises(pool_token.BadToken) as failed:
        pool_token.from_environment({pool_token.VARIABLE: text})
    assert "at least 16 characters" in str(failed.value)
    assert not text or text not in str(failed.value)


def test_a_token_from_a_file_may_end_in_a_line_break_and_no_variable_is_no_token() -> None:
    assert pool_token.from_environment({pool_token.VARIABLE: TOKEN + "\n"}) == TOKEN
    assert pool_token.from_environment({}) is None


def test_two_tokens_in_one_call_are_rejected() -> None:
    pair = (pool_token.HEADER, f"Bearer {TOKEN}")
    assert pool_token.problem(TOKEN, [pair]) is None
    assert pool_token.problem(TOKEN, [pair, pair]) is not None
