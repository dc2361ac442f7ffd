"""The way by which vLLM constructs our scheduler: classes, addresses, and what happens when a start fails."""

import functools
import logging

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import grpc
from vllm.config import DiffusionConfig
from vllm.v1.core.sched import async_scheduler, diffusion_scheduler
from vllm.v1.core.sched import scheduler as vllm_scheduler

from tidegate_control import pool_token
from tidegate_engine import engine_settings, live_engine, plugin
from tidegate_engine import scheduler as schedulers
from tidegate_policy.cost import CostModel
from tidegate_proto.v1 import control_pb2, control_pb2_grpc
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

LIMITS = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=16_000, max_batch=4)


@pytest.fixture
def port(monkeypatch):
    """A free port, which the settings name."""
    free = live_engine.free_port()
    monkeypatch.setenv("TIDEGATE_CONTROL_ADDRESS", f"127.0.0.1:{free}")
    monkeypatch.setenv("TIDEGATE_POLICY", "sjf")
    return free


@pytest.fixture
def build():
    """Builds schedulers as vLLM does; they are shut down afterwards."""
    built = []

    def make(change=None, **more):
        def constructed(vllm_config, **kwargs):
            if change is not None:
                change(vllm_config)
            return plugin.scheduler(vllm_config=vllm_config, **kwargs)

        built.append(engine.build(constructed, LIMITS, **more))
        return built[-1]

    yield make
    for each in built:
        each.shutdown()


def state(port, token=None):
    metadata = tuple(pool_token.header(token).items())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = control_pb2_grpc.EngineControlStub(channel)
        return stub.GetState(control_pb2.GetStateRequest(), timeout=10, metadata=metadata)


def test_the_control_port_of_vllm_requires_the_token_of_the_environment(port, build, monkeypatch):
    monkeypatch.setenv(pool_token.VARIABLE, "a-token-of-the-pool")
    build()
    with pytest.raises(grpc.RpcError) as rejected:
        state(port)
    assert rejected.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert state(port, "a-token-of-the-pool").policy == "sjf"


def test_an_engine_with_an_empty_token_opens_no_control_port_and_says_so(port, build, monkeypatch, caplog):
    monkeypatch.setenv(pool_token.VARIABLE, "")
    with caplog.at_level(logging.ERROR, logger="vllm.tidegate"):
        built = build()
    assert type(built) is schedulers.TidegateScheduler
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm.tidegate"]
    assert line.startswith("This engine runs without EngineControl. TIDEGATE_POOL_TOKEN must have at least 16")
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        state(port)


def test_a_second_scheduler_in_one_process_is_ours_and_an_address_in_use_is_one_line_in_the_log(port, build, caplog):
    first = build()
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="vllm.tidegate"):
        second = build()
    assert type(first) is type(second) is schedulers.TidegateScheduler
    (line,) = [record for record in caplog.records if record.name == "vllm.tidegate"]
    assert line.getMessage() == (
        f"This engine runs without EngineControl. EngineControl cannot listen on '127.0.0.1:{port}': Address already in use"
    )
    assert line.exc_info is None
    second.add_request(engine.request("a", 16, {}))
    assert list(second.schedule().num_scheduled_tokens) == ["a"]
    assert state(port).policy == "sjf"


def test_each_data_parallel_rank_of_a_host_has_a_control_port_of_its_own(port, build):
    def local_rank(rank, config):
        config.parallel_config.data_parallel_rank_local = rank

    for rank in range(3):
        build(functools.partial(local_rank, rank))
    for rank in range(3):
        assert state(port + rank).policy == "sjf"


def test_a_control_address_that_has_no_port_number_stays_as_it_is():
    class Parallel:
        data_parallel_rank_local = 2

    class Config:
        parallel_config = Parallel

    assert plugin.control_address("unix:@name", Config) == "unix:@name"
    assert plugin.control_address("[::1]:9010", Config) == "[::1]:9012"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("diffusion", [False, True])
def test_our_class_stands_over_the_class_that_vllm_would_choose(port, build, ahead, diffusion):
    def change(config):
        config.scheduler_config.async_scheduling = ahead
        config.scheduler_config.scheduler_cls = "tidegate_engine.plugin.scheduler"
        if diffusion:
            config.diffusion_config = DiffusionConfig(canvas_length=4)

    built = build(change)
    expected = {
        (False, False): vllm_scheduler.Scheduler,
        (False, True): async_scheduler.AsyncScheduler,
        (True, False): diffusion_scheduler.DiffusionScheduler,
        (True, True): diffusion_scheduler.DiffusionAsyncScheduler,
    }[diffusion, ahead]
    assert isinstance(built, schedulers.TidegateSchedulerMixin)
    assert type(built).__mro__[2] is expected
    assert (expected in (vllm_scheduler.Scheduler, async_scheduler.AsyncScheduler)) == (
        type(built) in (schedulers.TidegateScheduler, schedulers.TidegateAsyncScheduler)
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_engine_that_falls_back_reports_the_policy_that_vllm_runs(port, build, policy, monkeypatch):
    monkeypatch.setenv("TIDEGATE_PROFILE", "nowhere.yaml")
    built = build(scheduling=policy)
    assert type(built) is vllm_scheduler.Scheduler
    found = state(port)
    assert found.policy == policy
    assert "it failed to start" in found.fallback_reason


def test_the_settings_of_an_engine_name_the_address(port):
    assert engine_settings.load().control_address == f"127.0.0.1:{port}"
