"""Single calls to an engine, and the translation between messages and values."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping

import grpc
import pytest

import control_double
from tidegate_control import control_client, control_connections, control_contract, control_server, translation
from tidegate_policy import policies, qos
from tidegate_policy.engine import engine_status
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

STATE = engine_status.State(
    policy="two-lane",
    policy_parameters={"threshold_s": 2.5, "fast_share": 0.75},
    policy_reason="misses",
    policy_age_s=3.5,
    bypass=True,
    controls=engine_status.Controls(max_running=4, max_step_tokens=512),
    running=3,
    waiting=2,
    kv_usage=0.25,
    waiting_ids=("a", "b"),
    waiting_by_lane={"fast": 1, "slow": 1},
    preemptions=7,
    simulated_profile="a100-70b-tp8",
)


@pytest.fixture
async def double() -> AsyncIterator[control_double.FakeEngine]:
    engine = control_double.FakeEngine()
    await engine.start()
    yield engine
    await engine.stop()


async def test_an_engine_with_vllms_own_scheduler_reports_its_state_and_rejects_a_policy() -> None:
    address = "unix:@tidegate-control-client-test"
    stop = control_server.serve(
        control_contract.Fallback("no hook", policy="priority"), address=address, engine_version="1"
    ).stop
    client = control_client.EngineClient(address)
    try:
        state = await client.get_state(timeout_s=5.0)
        assert state == engine_status.State(policy="priority", fallback_reason="no hook")
        with pytest.raises(control_client.CallFailed, match=r"FAILED_PRECONDITION: .*no hook") as failed:
            await client.set_policy("edf", "a test")
        assert not failed.value.is_unreachable
    finally:
        await client.close()
        stop()


async def test_an_engine_that_does_not_run_is_unreachable() -> None:
    client = control_client.EngineClient("127.0.0.1:1")
    try:
        with pytest.raises(control_client.CallFailed, match="UNAVAILABLE") as failed:
            await client.get_state(timeout_s=5.0)
        assert failed.value.is_unreachable
    finally:
        await client.close()


async def test_an_answer_that_cannot_be_read_is_none(double: control_double.FakeEngine) -> None:
    double.babbles = True
    client = control_client.EngineClient(double.address)
    try:
        assert await client.get_state(timeout_s=5.0) is None
        assert await client.set_policy("edf", "a test") is None
    finally:
        await client.close()


class FloodingEngine(control_pb2_grpc.EngineControlServicer):
    """It reports as fast as its caller reads."""

    sent = 0

    async def GetState(  # type: ignore[override]
        self, request: control_pb2.GetStateRequest, context: object
    ) -> control_pb2.EngineState:
        return translation.to_state(STATE, engine_version="1")

    async def WatchQos(  # type: ignore[override]
        self, request: control_pb2.WatchQosRequest, context: object
    ) -> AsyncIterator[control_pb2.QosReport]:
        report = translation.to_report(SmallEngine().cut())
        while True:
            self.sent += 1
            yield report


async def test_an_engine_that_floods_its_watcher_is_read_at_twice_its_pace_and_held_back() -> None:
    server, engine, address = grpc.aio.server(), FloodingEngine(), "unix:@tidegate-flood-test"
    control_pb2_grpc.add_EngineControlServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    client = control_client.EngineClient(address)
    clock = asyncio.get_running_loop().time
    began_s, read = clock(), 0
    try:
        async with contextlib.aclosing(client.watch(0.2)) as reports:
            async for _ in reports:
                read += 1
                if read == control_client.REPORTS_IN_A_ROW + 10:
                    assert await client.get_state(timeout_s=60.0) == STATE, "other calls pass the reports"
                    break
        assert clock() - began_s > 0.9, "after the reports in a row, two in each 0.2 s"
        assert engine.sent < 20_000, "the window of the connection has few reports"
    finally:
        await client.close()
        await server.stop(0)


class SmallEngine:
    """An engine without calls, which `control_server` serves."""

    def __init__(self) -> None:
        self.policy = policies.create("fcfs")
        self.switches = 0
        self.bypass = False

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float] | None = None, *, bypass: bool = False
    ) -> engine_status.Switched:
        self.bypass = bypass
        previous, self.policy = self.policy, policies.create(name, parameters)
        self.switches += 1
        return engine_status.Switched(policy=name, previous=previous.name, reordered=0)

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> engine_status.Controls:
        return engine_status.Controls()

    def state(self, *, max_waiting_ids: int = engine_status.SHOWN_WAITING) -> engine_status.State:
        return engine_status.State(
            policy=self.policy.name,
            policy_parameters=self.policy.parameters,
            waiting=2000,
            waiting_ids=tuple(f"c{number}" for number in range(min(max_waiting_ids, 2000))),
        )

    def watch(self) -> control_contract.Watch:
        return self

    def cut(self) -> engine_status.WatchReport:
        return engine_status.WatchReport(
            policy=self.policy.name,
            policy_parameters=self.policy.parameters,
            bypass=self.bypass,
            window=qos.Qos(window_s=0.1),
        )

    def close(self) -> None:
        return None


async def test_an_engine_lists_as_many_waiting_calls_as_its_caller_wants_and_1000_at_most() -> None:
    address = "unix:@tidegate-waiting-ids-test"
    stop = control_server.serve(SmallEngine(), address=address, engine_version="1").stop
    client = control_client.EngineClient(address)
    try:
        state = await client.get_state(timeout_s=5.0)
        assert state is not None
        assert (state.waiting, state.waiting_ids) == (2000, ())
        async with grpc.aio.insecure_channel(address) as channel:
            stub = control_pb2_grpc.EngineControlStub(channel)  # type: ignore[no-untyped-call]
            for wanted, listed in ((None, 1000), (0, 0), (3, 3), (5000, 1000)):
                message = await stub.GetState(control_pb2.GetStateRequest(max_waiting_ids=wanted))
                assert len(message.waiting_ids) == listed
    finally:
        await client.close()
        stop()


async def test_connections_put_a_policy_with_parameters_in_force_once_and_repair_a_difference() -> None:
    engine, address = SmallEngine(), "unix:@tidegate-connections-test"
    stop = control_server.serve(engine, address=address, engine_version="1").stop
    connections = control_connections.EngineConnections(pace=control_connections.ReportPace(0.1, 0.1))

    async def put() -> dict[str, str]:
        connections.take_reports()
        async with asyncio.timeout(30):
            while len(connections.take_reports()[address]) < 2:  # the first may be of the time before
                await asyncio.sleep(0.25)
        return await connections.put_in_force(
            "two-lane", "a test", {"threshold_s": 2.5}, {"threshold_s": 4.0, "fast_share": 0.75}
        )

    try:
        await connections.retarget([address])
        assert await put() == {}
        assert await put() == {}
        assert engine.switches == 1
        assert dict(engine.policy.parameters) == {"threshold_s": 2.5, "fast_share": 0.75}
        engine.policy = policies.create("two-lane")
        assert await put() == {}
        assert engine.switches == 2
        assert engine.policy.parameters["threshold_s"] == 2.5
    finally:
        await connections.close()
        stop()


async def test_a_bypass_reaches_the_engine_and_ends_with_the_next_policy() -> None:
    engine, address = SmallEngine(), "unix:@tidegate-bypass-test"
    stop = control_server.serve(engine, address=address, engine_version="1").stop
    client = control_client.EngineClient(address)
    try:
        await client.set_policy("fcfs", "an emergency", bypass=True)
        assert engine.bypass
        await client.set_policy("edf", "a test")
        assert not engine.bypass
    finally:
        await client.close()
        stop()


async def test_parameters_that_the_policy_does_not_have_are_rejected_with_the_reason(
    double: control_double.FakeEngine,
) -> None:
    client = control_client.EngineClient(double.address)
    try:
        with pytest.raises(
            control_client.CallFailed, match="INVALID_ARGUMENT: policy 'edf' has no parameter 'fast_share'"
        ):
            await client.set_policy("edf", "a test", {"fast_share": 0.5})
        assert await client.set_policy("two-lane", "a test", {"fast_share": 0.5}) is not None
        assert double.parameters == {"threshold_s": 4.0, "fast_share": 0.5}
    finally:
        await client.close()


def test_a_state_survives_both_directions_of_the_translation() -> None:
    assert translation.from_state(translation.to_state(STATE, engine_version="1")) == STATE


def test_a_report_survives_both_directions_of_the_translation() -> None:
    window = qos.Qos(
        window_s=2.0,
        arrived=3,
        finished=2,
        ttft=qos.Histogram(counts=(0, 2)),
        with_target=2,
        missed=1,
        tenants={"search": qos.TenantService(weight=2.0, served_tokens=10, waiting=1, with_target=2, missed=1)},
        classes={"batch": qos.Targets(with_target=2, missed=1), "": qos.Targets()},
    )
    report = engine_status.WatchReport(
        policy="two-lane",
        policy_parameters={"threshold_s": 2.5, "fast_share": 0.75},
        bypass=True,
        window=window,
    )
    assert translation.from_report(translation.to_report(report)) == report


def test_a_state_with_impossible_numbers_cannot_be_read() -> None:
    assert translation.from_state(control_pb2.EngineState(policy="edf", kv_usage=math.nan)) is None


async def test_an_idle_engine_is_silent_only_after_its_idle_period() -> None:
    address = "unix:@tidegate-idle-test"
    stop = control_server.serve(SmallEngine(), address=address, engine_version="1").stop
    connections = control_connections.EngineConnections(pace=control_connections.ReportPace(0.1, 60.0))
    try:
        await connections.retarget([address])
        async with asyncio.timeout(30):
            while not connections.reported():
                await asyncio.sleep(0.05)
        await asyncio.sleep(2 * control_connections.RECONNECT_S)  # longer than the patience with a busy engine
        assert connections.silent() == set()
        connections.pace = control_connections.ReportPace(0.1, 0.1)
        stop()
        await connections.retarget([address])
        async with asyncio.timeout(30):
            while connections.silent() != {address}:
                await asyncio.sleep(0.1)
    finally:
        await connections.close()
        stop()
