"""Single calls to an engine, and the translation between messages and values."""

import math
from collections.abc import AsyncIterator

import pytest

from tidegate_control import control_client, control_contract, control_double, control_server, translation
from tidegate_policy import qos
from tidegate_proto.v1 import control_pb2

STATE = control_contract.State(
    policy="edf",
    policy_reason="misses",
    policy_age_s=3.5,
    controls=control_contract.Controls(max_running=4, max_step_tokens=512),
    running=3,
    waiting=2,
    kv_usage=0.25,
    waiting_ids=("a", "b"),
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
    stop = control_server.serve(control_contract.Fallback("no hook"), address=address, engine_version="1")
    client = control_client.EngineClient(address)
    try:
        state = await client.get_state(timeout_s=5.0)
        assert state == control_contract.State(policy="priority", fallback_reason="no hook")
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


def test_a_state_survives_both_directions_of_the_translation() -> None:
    assert translation.from_state(translation.to_state(STATE, engine_version="1")) == STATE


def test_a_report_survives_both_directions_of_the_translation() -> None:
    window = qos.Qos(
        window_s=2.0,
        arrived=3,
        finished=2,
        ttft=qos.Histogram(counts=(0, 2), sum_s=0.25),
        with_target=2,
        missed=1,
        tenants={"search": qos.TenantService(weight=2.0, served_tokens=10, waiting=1)},
    )
    assert translation.from_report(translation.to_report("edf", window, 1.5)) == window


def test_a_state_with_impossible_numbers_cannot_be_read() -> None:
    assert translation.from_state(control_pb2.EngineState(policy="edf", kv_usage=math.nan)) is None
