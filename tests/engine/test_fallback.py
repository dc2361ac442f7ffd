"""When vLLM has moved something, the engine serves with vLLM's own scheduler and says so."""

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import grpc

from tidegate_engine import compat, plugin
from tidegate_engine.vllm_server import OURS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_installed_vllm_has_everything_that_we_touch():
    assert compat.missing() == []
    assert compat.problem() is None


@pytest.mark.parametrize("version", ["0.30.9", "0.33.0", "1.0.0+cpu", "dev"])
def test_an_untested_version_is_a_sentence(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    assert "is not one that Tidegate is tested with (0.31 <= version < 0.33)" in compat.problem()


def test_every_missing_name_is_in_the_sentence(monkeypatch):
    monkeypatch.delattr("vllm.v1.core.sched.request_queue.RequestQueue.remove_request")
    monkeypatch.delattr("vllm.v1.core.sched.request_queue.SchedulingPolicy")
    assert compat.problem() == (
        "this vLLM lacks vllm.v1.core.sched.request_queue.RequestQueue.remove_request, "
        "vllm.v1.core.sched.request_queue.SchedulingPolicy, which Tidegate's scheduler needs"
    )


def test_vllm_is_told_our_scheduler_by_a_path_that_exists():
    assert OURS["--scheduler-cls"] == "tidegate_engine.plugin.scheduler"
    assert callable(plugin.scheduler)


def test_an_engine_without_what_we_touch_serves_with_vllms_priority_scheduler_and_says_so(stock):
    assert all(stock.answers.values())
    assert stock.state.policy == "priority"
    assert "lacks vllm.v1.core.sched.request_queue.RequestQueue.remove_request" in stock.state.fallback_reason
    assert stock.refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert stock.state.fallback_reason in stock.refusal.details()
