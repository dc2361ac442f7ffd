"""A fault in Tidegate's code beside the policies never ends the engine: holds, counters, costs, labels, facts of steps."""

import dataclasses
import logging

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from driven_scheduler import TIGHT, Driven

from tidegate_engine import meters, plan_execution, vllm_labels
from tidegate_engine import scheduler as schedulers
from tidegate_engine.scheduler import TidegateAsyncScheduler, TidegateScheduler
from tidegate_policy import window
from tidegate_policy.engine import session_hold
from tidegate_policy.predict import step_cost, tool_times

pytestmark = pytest.mark.vllm

SLOW = dataclasses.replace(TIGHT, prefill_s=5.0)
"""Little memory, and prompts that take so long that contexts of sessions are held."""
HOLD = session_hold.Settings(max_share=0.8, max_s=100.0)

PLACES = [
    *[(session_hold.SessionHolds, name, "hold") for name in ("on_arrival", "on_call_end", "on_used", "expired")],
    *[(session_hold.SessionHolds, name, "hold") for name in ("release_one", "clear")],
    *[(tool_times.ToolTimes, name, "hold") for name in ("on_arrival", "on_call_end", "expect")],
    (session_hold.AllocationRate, "observe", "hold"),
    *[(window.Recorder, name, "watch") for name in ("on_arrival", "on_first_token", "on_preemption", "on_end")],
    (step_cost.StepCost, "observe", "cost"),
    (vllm_labels, "call", "labels"),
    *[(schedulers, name, "step") for name in ("step_work", "_computed")],
    (schedulers.TidegateSchedulerMixin, "_prompt_tokens", "step"),
    (plan_execution.PlanExecution, "_carry_out", "plan"),
    (plan_execution.PlanExecution, "before_free", "hold"),
    (meters.CoreReader, "read", "meter"),
]
"""Where each fault happens, and the hook under which it is counted."""


class FaultyMeter:
    def __getattr__(self, name):
        def fault(*facts, **more):
            raise RuntimeError(f"a fault in {name}")

        return fault


def used_blocks(driven):
    pool = driven.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def served(driven):
    """Serves sessions with tools, preemptions, a switch, a report and a reset of the cache. Returns the reports."""
    watch = driven.scheduler.watch()
    for turn in range(4):
        for other in range(4):
            driven.add(f"other {turn} {other}", prompt=60 + 10 * other, output=40)
        driven.starts()
        for session in ("s", "t"):
            more = {"session": session, "tool": "search", "tool_ms": 5000}
            driven.add(f"{session}{turn}", prompt=120, output=2, prefixes=[(7, 112)], **more)
            driven.starts()
        driven.add(f"large {turn}", prompt=290, output=2)
        driven.starts()
        driven.scheduler.set_policy(("sjf", "urgency", "relquery", "edf")[turn], "a test")
    driven.scheduler.reset_prefix_cache()
    driven.clock.now_s += 1000.0
    watch.cut()
    state = driven.scheduler.state()
    assert (state.running, state.waiting, state.kv_usage) == (0, 0, 0.0)
    assert not driven.scheduler.requests
    assert not driven.scheduler._core._calls
    assert used_blocks(driven) == 0, "a block of a held context was not freed"


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
@pytest.mark.parametrize(("owner", "name", "hook"), PLACES)
@pytest.mark.parametrize("healthy", [0, 5])
def test_a_fault_costs_no_request_and_no_memory(owner, name, hook, healthy, scheduler, monkeypatch, caplog):
    """The method works `healthy` times before it raises."""
    original, times = getattr(owner, name), []

    def faulty(*facts, **more):
        times.append(1)
        if len(times) > healthy:
            raise RuntimeError(f"a fault in {name}")
        return original(*facts, **more)

    monkeypatch.setattr(owner, name, faulty)
    driven = Driven(SLOW, scheduler=scheduler, hold=HOLD, learn_cost=True)
    with caplog.at_level(logging.ERROR, logger="vllm.tidegate"):
        served(driven)
    assert driven.scheduler._core.preemptions
    if len(times) > healthy:
        (record,) = [record for record in caplog.records if record.name == "vllm.tidegate"]
        assert (hook in record.getMessage(), record.exc_info[1].args) == (True, (f"a fault in {name}",))
        assert driven.scheduler._core.failures.counts[hook] >= 1
    else:
        assert healthy, f"{name} never ran"


@pytest.mark.parametrize("scheduler", [TidegateScheduler, TidegateAsyncScheduler])
def test_a_meter_that_raises_costs_no_request(scheduler):
    driven = Driven(SLOW, scheduler=scheduler, hold=HOLD, meter=FaultyMeter())
    driven.add("bad label", prompt=40, output=3, urgency="high")
    served(driven)
    assert driven.scheduler._core.failures.counts["meter"]
