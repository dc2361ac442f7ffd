"""vLLM's behaviour is the contract: the same history on vLLM's class and on ours gives the same steps and outputs."""

import copy
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

import vllm_histories
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

PLAIN = (Scheduler, TidegateScheduler, 0)
PIPELINE = (Scheduler, TidegateScheduler, 2)
"""Pipeline parallelism: vLLM schedules two further steps before the output of the first comes back."""
ASYNC = (AsyncScheduler, TidegateAsyncScheduler, 1)
FEATURES = {
    "aborts": ("aborts",),
    "structured output": ("grammars", "aborts", "errors"),
    "LoRA limits": ("loras", "aborts"),
    "connector": ("connector", "aborts"),
    "connector and resets": ("connector", "resets", "aborts"),
    "connector and deferred frees": ("connector", "deferred frees", "aborts"),
    "drafts": ("drafts", "aborts"),
    "resets": ("resets", "aborts"),
    "pauses": ("pauses", "aborts"),
    "sleep": ("pauses", "resets", "aborts"),
}


def history(scheduler_class, features, seed, ahead, policy):
    scheduler = vllm_histories.build(scheduler_class, features=features, seed=seed, scheduling=policy)
    return vllm_histories.History(scheduler, seed, features=features, ahead=ahead).run()


CASES = [
    pytest.param(FEATURES[name], *classes, id=f"{name}, {kind}")
    for name in FEATURES
    for kind, classes in {"plain": PLAIN, "pipeline": PIPELINE, "async": ASYNC}.items()
    if (name, kind) != ("LoRA limits", "pipeline")  # vLLM's own scheduler fails an assertion there
]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("features", "stock", "ours", "ahead"), CASES)
def test_our_steps_are_vllms_steps(features, stock, ours, ahead, policy):
    expected = history(stock, features, 1, ahead, policy)
    assert any(step.get("preempted") for step in expected) or "pauses" in features
    assert history(ours, features, 1, ahead, policy) == expected


@pytest.mark.parametrize("seed", range(3))
def test_our_steps_are_vllms_steps_with_streaming_input(seed):
    features = ("sessions", "aborts")
    assert history(TidegateScheduler, features, seed, 0, "fcfs") == history(Scheduler, features, seed, 0, "fcfs")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(3))
def test_all_sessions_end_with_async_scheduling_and_resets(seed, policy):
    history(TidegateAsyncScheduler, ("sessions", "resets", "aborts"), seed, 1, policy)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_session_that_is_preempted_while_its_stop_token_is_in_flight_goes_on(policy):
    scheduler = vllm_histories.build(TidegateAsyncScheduler, scheduling=policy)
    ends, steps = {"a": 10_000, "b": 10_000}, []
    for name in ends:
        scheduler.add_request(vllm_histories.made(name, 300, arrival_s=ord(name), resumable=True))
    while not steps or not steps[-1][0].preempted_req_ids:
        assert len(steps) < 2000, "memory never became short"
        steps.append((output := scheduler.schedule(), engine.producing(output, scheduler.requests)))
        if len(steps) > 1:
            output, produced = steps[-2]
            ends["b"] = 0 if steps[-1][0].preempted_req_ids else ends["b"]
            scheduler.update_from_output(output, engine.forward(output, produced, scheduler.requests, ends))
    session = scheduler.requests["b"]
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert session in scheduler.waiting
    assert scheduler.get_num_unfinished_requests() == 1
    scheduler.add_request(vllm_histories.made("b", 5, arrival_s=200.0, resumable=True))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert "b" in scheduler.schedule().num_scheduled_tokens


@pytest.mark.parametrize("scheduler_class", [TidegateScheduler, TidegateAsyncScheduler])
class TestCodeThatFillsVllmsAttributesItself:
    """Tests and extensions of vLLM do this."""

    def test_a_request_that_is_put_into_the_queue_directly_is_served(self, scheduler_class):
        scheduler = vllm_histories.build(scheduler_class)
        request = vllm_histories.made("a", 20, arrival_s=1.0)
        scheduler.requests["a"] = request
        scheduler.waiting.add_request(request)
        assert list(scheduler.waiting) == [request]
        assert scheduler.waiting.peek_request() is request
        assert list(scheduler.schedule().num_scheduled_tokens) == ["a"]

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_a_request_that_is_put_into_running_directly_can_be_preempted(self, scheduler_class, policy):
        scheduler = vllm_histories.build(scheduler_class, scheduling=policy)
        for name in "ab":
            request = vllm_histories.made(name, 20, arrival_s=1.0)
            request.status = RequestStatus.RUNNING
            scheduler.requests[name] = request
            scheduler.running.append(request)
        scheduler.schedule()
        scheduler.reset_prefix_cache(reset_running_requests=True)
        assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert len(scheduler.waiting) == 0

    def test_the_queue_behaves_as_vllms_own(self, scheduler_class):
        queue = vllm_histories.build(scheduler_class).waiting
        requests = [vllm_histories.made(name, 20, arrival_s=1.0) for name in "abcd"]
        for request in requests:
            queue.add_request(request)
        assert (len(queue), bool(queue), requests[0] in queue) == (4, True, True)
        assert queue.pop_request() is requests[0]
        assert requests[0] not in queue
        queue.prepend_request(requests[0])
        assert list(queue) == requests
        queue.remove_requests({requests[1], requests[3]})
        queue.remove_request(requests[0])
        with pytest.raises(ValueError, match="'a' does not wait here"):
            queue.remove_request(requests[0])
        queue.prepend_requests([requests[1], requests[0]])
        assert list(queue) == requests[:3]
        queue.add_request(requests[0])
        assert list(queue) == [requests[1], requests[2], requests[0]], "it moves to the end"
        while queue:
            queue.pop_request()
        with pytest.raises(IndexError):
            queue.pop_request()
        with pytest.raises(IndexError):
            queue.peek_request()

    def test_a_request_double_without_parameters_can_wait(self, scheduler_class):
        queue = vllm_histories.build(scheduler_class).waiting
        double = mock.Mock(request_id="double", sampling_params=None)
        queue.add_request(double)
        assert queue.pop_request() is double

    def test_outputs_may_be_copies(self, scheduler_class):
        scheduler = vllm_histories.build(scheduler_class)
        watch = scheduler.watch()
        scheduler.add_request(vllm_histories.made("a", 20, arrival_s=1.0))
        for _ in range(3):
            output = scheduler.schedule()
            produced = engine.producing(output, scheduler.requests)
            model = engine.forward(output, produced, scheduler.requests, {"a": 3})
            scheduler.update_from_output(copy.deepcopy(output), model)
        assert watch.cut().window.finished == 1
        assert not scheduler._steps
