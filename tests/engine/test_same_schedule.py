"""Under `fcfs` our scheduler's steps are vLLM's own FCFS steps, preemption included."""

import random
from collections import deque

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler
from tidegate_policy.cost import CostModel
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

SMALL = CostModel(step_s=0.02, prefill_s=1e-4, kv_tokens=1200, max_batch=12, max_step_tokens=128)
"""So little KV that running requests are preempted all the time."""


def history(scheduler, seed, *, ahead=0):
    """Drives a random workload, arrivals and aborts included, and returns what every step scheduled."""
    rng = random.Random(seed)
    arrivals = deque(
        (rng.randrange(0, 60), f"r{index}", rng.randrange(1, 300), rng.randrange(1, 120)) for index in range(50)
    )
    arrivals = deque(sorted(arrivals))
    aborts = {f"r{index}": rng.randrange(1, 200) for index in rng.sample(range(50), 5)}
    ends, steps, inflight = {}, [], deque()
    for step in range(3000):
        while arrivals and arrivals[0][0] <= step:
            _, name, prompt, output = arrivals.popleft()
            ends[name] = output
            scheduler.add_request(engine.request(name, prompt, {}))
        for name in [name for name, at in aborts.items() if at == step]:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if not arrivals and not scheduler.has_requests():
            return steps
        output = scheduler.schedule()
        steps.append(facts(output))
        inflight.append((output, engine.producing(output, scheduler.requests)))
        if len(inflight) > ahead:
            output, produced = inflight.popleft()
            scheduler.update_from_output(output, engine.forward(output, produced, scheduler.requests, ends))
    raise AssertionError("the workload never ended")


def facts(output):
    cached = output.scheduled_cached_reqs
    return {
        "tokens": list(output.num_scheduled_tokens.items()),
        "new": [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs],
        "cached": list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
        "resumed": sorted(cached.resumed_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "finished": sorted(output.finished_req_ids),
    }


@pytest.mark.parametrize("seed", range(8))
def test_fcfs_is_vllms_own_fcfs_step_by_step(seed):
    stock = history(engine.build(Scheduler, SMALL, scheduling="fcfs"), seed)
    ours = history(engine.build(TidegateScheduler, SMALL, policy="fcfs"), seed)
    assert sum(len(step["preempted"]) for step in stock) > 10
    assert ours == stock


@pytest.mark.parametrize("seed", range(4))
def test_fcfs_is_vllms_own_fcfs_with_async_scheduling(seed):
    stock = history(engine.build(AsyncScheduler, SMALL, scheduling="fcfs"), seed, ahead=1)
    ours = history(engine.build(TidegateAsyncScheduler, SMALL, policy="fcfs"), seed, ahead=1)
    assert sum(len(step["preempted"]) for step in stock) > 10
    assert ours == stock
