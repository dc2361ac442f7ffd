"""The engine's own Prometheus metrics count what a driven scheduler does."""

import types

import prometheus_client
import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from driven_scheduler import Driven
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.request import RequestStatus

from tidegate_engine import meters
from tidegate_policy import cost, window
from tidegate_policy.engine import engine_core, session_hold, step
from tidegate_policy.model import Call, CallId

pytestmark = pytest.mark.vllm

COST = cost.CostModel(step_s=0.02, prefill_s=1e-3)
SMALL = cost.CostModel(step_s=0.02, prefill_s=0.1, kv_tokens=64 * 16, max_batch=4, max_step_tokens=512)


@pytest.fixture
def grown():
    """The growth of a metric since the start of the test."""
    before = {(item.name, *sorted(item.labels.items())): item.value for item in samples()}

    def growth(name, **labels):
        value = prometheus_client.REGISTRY.get_sample_value(name, labels)
        return (value or 0) - before.get((name, *sorted(labels.items())), 0)

    return growth


def samples():
    meters.prometheus()
    return [item for metric in prometheus_client.REGISTRY.collect() for item in metric.samples]


def core_with(meter, **more):
    limits = step.EngineLimits(max_running=4, max_step_tokens=100)
    return engine_core.EngineCore(0.0, cost=COST, limits=limits, policy="fcfs", served=meter.served, **more)


def arrive(core, name, **fields):
    core.on_arrival(0.0, Call(id=CallId(name), arrived_at_s=0.0, prompt_tokens=5, output_predicted=5, **fields))


def test_calls_are_counted_by_class_and_outcome_and_tokens_by_tenant(grown):
    driven = Driven(meter=meters.prometheus())
    for name, labels in (
        ("met", {"class": "chat", "budget_ms": 60_000}),
        ("missed", {"class": "chat", "budget_ms": 1}),
        ("no-target", {}),
    ):
        driven.add(name, output=3, tenant="search", **labels)
    driven.starts()
    driven.add("aborted", tenant="search")
    driven.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    calls = "tidegate_engine_calls_total"
    assert [grown(calls, **{"class": "chat", "outcome": outcome}) for outcome in ("met", "missed")] == [1, 1]
    assert [grown(calls, **{"class": "none", "outcome": outcome}) for outcome in ("no-target", "aborted")] == [1, 1]
    assert grown("tidegate_engine_ttft_seconds_count", **{"class": "chat"}) == 2
    assert grown("tidegate_engine_tpot_seconds_count", **{"class": "chat"}) == 2
    assert grown("tidegate_engine_tenant_tokens_total", tenant="search") == 9
    for outcome in ("met", "missed", "no-target", "aborted"):
        assert grown("tidegate_engine_tenant_calls_total", tenant="search", outcome=outcome) == 1


def test_labels_are_bounded(grown):
    core = core_with(meters.prometheus())
    for index in range(window.MAX_TENANTS + 50):
        arrive(core, str(index), tenant=f"tenant{index}", slo_class=f"class{index}")
        core.on_end(1.0, CallId(str(index)), finished=False)
    for label, name in (
        ("class", "tidegate_engine_calls_total"),
        ("tenant", "tidegate_engine_tenant_tokens_total"),
        ("tenant", "tidegate_engine_tenant_calls_total"),
    ):
        values = {item.labels[label] for item in samples() if item.name == name}
        assert len(values) <= 101
        assert "other" in values


def test_the_held_bytes_follow_the_held_contexts():
    def held():
        return prometheus_client.REGISTRY.get_sample_value("tidegate_engine_kv_held_bytes", {"action": "preserve"})

    driven = Driven(SMALL, hold=session_hold.Settings(max_share=0.8, max_s=100.0))
    scheduler = driven.scheduler  # its KV cache has no bytes
    scheduler._core_reader = meters.CoreReader(scheduler._core, meters.prometheus(), kv_token_bytes=10.0)
    driven.add("first", prompt=320, output=2, prefixes=[(7, 320)], session="s", tool="search", tool_ms=5000)
    driven.starts()
    driven.add("busy", prompt=640, output=4)
    driven.starts()
    driven.add("second", prompt=320, output=2, prefixes=[(7, 320)], session="s", tool="search", tool_ms=5000)
    driven.starts()
    assert held() == 320 * 10
    scheduler.set_policy("fcfs", "an emergency", bypass=True)
    assert held() == 0


def test_tensors_that_share_one_allocation_count_once():
    tensor = KVCacheTensor(size=64_000, layers=["a"], layer_stride=1, block_stride=1)
    config = KVCacheConfig(num_blocks=40, kv_cache_tensors=[tensor, tensor], kv_cache_groups=[])
    assert meters.kv_token_bytes(config, 16) == 100


def test_a_model_without_a_kv_cache_holds_no_bytes():
    assert meters.kv_token_bytes(types.SimpleNamespace(num_blocks=1, kv_cache_tensors=[]), 16) == 0


def test_the_error_of_the_cost_model_is_updated_after_64_steps():
    def errors():
        return {item.labels["statistic"]: item.value for item in samples() if item.name == NAME}

    NAME = "tidegate_engine_cost_error_ratio"
    core = core_with(meters.prometheus())
    reader = meters.CoreReader(core, meters.prometheus(), kv_token_bytes=1.0)
    for index in range(meters.COST_ERROR_STEPS):
        core.on_step(float(index), step_s=0.03, computed={}, ended={}, work=engine_core.StepWork(uncached=10))
        reader.read()
    assert errors() == {"mean": core.step_cost.mean_error, "p95": core.step_cost.p95_error}


def test_each_exception_of_a_policy_is_counted_once(grown):
    core = core_with(meters.prometheus())
    reader = meters.CoreReader(core, meters.prometheus(), kv_token_bytes=1.0)
    for _ in range(3):
        core.failures.add("fcfs.key", ValueError("a test"))
        reader.read()
        reader.read()
    assert grown("tidegate_engine_policy_failures_total", hook="fcfs.key") == 3
