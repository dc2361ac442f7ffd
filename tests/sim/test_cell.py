"""A cell of a benchmark: a trace on a pool behind the gateway core, in virtual time."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from tidegate_policy import gateway_core
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch import routing, waiting_limits
from tidegate_policy.model import Call, CallId, DropReason, EngineId
from tidegate_policy.steer import guards, steering_loop
from tidegate_sim import bench_report, cell, history, pools, text2sql_workflows, trace_format

pytestmark = pytest.mark.vllm

COST = CostModel(step_s=0.02, prefill_s=1e-4, attention_s=1e-9, decode_s=1e-4, context_s=1e-7, kv_tokens=64_000)


def row(rule="score", policy="urgency", **more):
    settings = gateway_core.CoreSettings(dispatch=routing.DispatchSettings(rule=rule), policy=policy, **more)
    return cell.Row(gateway=settings)


def ran(calls, chosen, pool=None):
    engines = pool or pools.pool("hetero-1")
    learned = text2sql_workflows.trace(
        random.Random(9), [text2sql_workflows.FINANCIAL], workflows=20, rate=1.0, name="learned"
    )
    return cell.Cell(engines, chosen, learned, seed=1).run(calls)


def workflows(count=4, rate=0.5):
    return text2sql_workflows.trace(
        random.Random(5), [text2sql_workflows.FINANCIAL], workflows=count, rate=rate, name="t"
    )


def test_every_workflow_of_a_trace_ends():
    calls = workflows()
    outcome = ran(calls, row())
    assert len(outcome.latencies_s) == 4
    assert sum(outcome.calls_on.values()) == len(calls)
    assert list(outcome.finished_s) == sorted(outcome.finished_s)


def test_round_robin_gives_each_engine_its_turn():
    outcome = ran(workflows(), row(rule="round-robin"))
    assert max(outcome.calls_on.values()) - min(outcome.calls_on.values()) <= 1


def test_a_bound_on_calls_in_flight_keeps_calls_in_the_gateway_and_still_serves_them_all():
    pool = {EngineId("only"): COST}
    calls = [trace_format.TraceCall(id=f"c{n}", arrival_s=0.0, prompt_tokens=2000, output_tokens=5) for n in range(30)]
    early = ran(calls, row(policy="fcfs"), pool)
    late = ran(calls, row(policy="fcfs", max_inflight=3), pool)
    assert len(late.latencies_s) == 30
    assert early.queued_share > late.queued_share


def test_a_tool_between_calls_takes_its_time():
    tool = trace_format.Tool(name="sql", duration_s=100.0)
    calls = [
        trace_format.TraceCall(id="a", arrival_s=0.0, prompt_tokens=10, output_tokens=1, workflow="w", tool=tool),
        trace_format.TraceCall(id="b", arrival_s=7.0, prompt_tokens=10, output_tokens=1, workflow="w", after=("a",)),
    ]
    (latency_s,) = ran(calls, row()).latencies_s
    assert latency_s == pytest.approx(107.0, abs=0.5)


def test_the_history_is_of_the_trace_that_it_learned_from():
    engines = list(pools.pool("hetero-1").values())
    calls = [
        trace_format.TraceCall(id="a", arrival_s=0.0, prompt_tokens=1000, output_tokens=10, workflow="w", stage="one"),
        trace_format.TraceCall(
            id="b", arrival_s=0.0, prompt_tokens=1000, output_tokens=30, workflow="w", stage="two", after=("a",)
        ),
        trace_format.TraceCall(
            id="c", arrival_s=0.0, prompt_tokens=1000, output_tokens=50, workflow="w", stage="two", after=("a",)
        ),
    ]
    core = gateway_core.GatewayCore(gateway_core.CoreSettings(), random.Random(0))
    history.learn(core, calls, engines, model="m")
    predicted = [core.lengths.predict(("", "", stage, "m"), None).expected for stage in ("one", "two", "never seen")]
    assert predicted == [10, 40, 30]
    slowest = Call(id=CallId("c"), arrived_at_s=0.0, prompt_tokens=1000, output_predicted=50)
    after_one_s = core.remaining_work.predict(("", "", "one"))
    assert after_one_s == pytest.approx(sum(model.call_seconds(slowest) for model in engines) / len(engines))
    assert core.remaining_work.predict(("", "", "two")) == 0.0
    assert core.remaining_work.predict(("", "", "never seen")) is None


def test_what_a_trace_claims_reaches_the_engines():
    pool = {EngineId("only"): replace(COST, max_batch=1)}
    calls = [
        trace_format.TraceCall(
            id=f"c{level}", arrival_s=0.001 * index, prompt_tokens=2000, output_tokens=50, urgency=level
        )
        for index, level in enumerate((2, 4, 3, 0, 1))
    ]
    by_urgency = [item.urgency for item in ran(calls, row(policy="priority"), pool).calls]
    by_arrival = [item.urgency for item in ran(calls, row(policy="fcfs"), pool).calls]
    assert by_urgency == [2, 0, 1, 3, 4]
    assert by_arrival == [2, 4, 3, 0, 1]


def test_a_call_with_a_deadline_of_its_own_is_shed_when_it_still_waits_in_the_gateway():
    pool = {EngineId("only"): COST}
    calls = [
        trace_format.TraceCall(
            id=f"c{n}", arrival_s=0.0, prompt_tokens=2000, output_tokens=500, deadline_s=2.0, slo_class="batch"
        )
        for n in range(4)
    ]
    outcome = ran(calls, row(policy="fcfs", max_inflight=1), pool)
    assert [item.shed for item in outcome.calls].count(DropReason.DEADLINE_UNREACHABLE) == 3
    assert len(outcome.latencies_s) == 1


def test_stock_vllm_under_fcfs_gives_the_same_figures_as_our_class_under_fcfs():
    calls = workflows()
    ours = ran(calls, row(rule="least-requests", policy="fcfs"))
    stock = ran(calls, replace(row(rule="least-requests", policy="fcfs"), stock_scheduler=True))
    assert stock.latencies_s == ours.latencies_s


def test_a_row_without_prefix_cache_computes_shared_prefixes_again():
    calls = [
        trace_format.TraceCall(id=f"c{n}", arrival_s=5.0 * n, prompt_tokens=4000, output_tokens=1, prefix=((7, 3904),))
        for n in range(2)
    ]
    pool = {EngineId("only"): COST}
    (_, cached_s), (_, computed_s) = (
        ran(calls, replace(row(), prefix_cache=cache), pool).latencies_s for cache in (True, False)
    )
    assert cached_s < 0.1
    assert computed_s > 0.4


def test_steering_switches_the_policy_of_a_cell_when_short_calls_stand_behind_long_ones():
    pool = {EngineId("only"): replace(COST, max_batch=4)}
    calls = [
        trace_format.TraceCall(
            id=f"c{n}",
            arrival_s=0.05 * n,
            prompt_tokens=100,
            output_tokens=400 if n % 8 == 0 else 5,
            tenant=f"t{n % 8 == 0}",
        )
        for n in range(300)
    ]
    settings = steering_loop.Settings(
        allow=("two-lane", "fcfs"), interval_s=5.0, guards=guards.GuardSettings(dwell_s=5.0)
    )
    together = row(policy="fcfs", limits=waiting_limits.Limits(share_among_tenants=False))
    steered = ran(calls, replace(together, steering=settings), pool)
    assert steered.switches
    assert steered.switches[0][1] == "two-lane"
    assert ran(calls, together, pool).switches == ()


def test_an_unknown_pool_is_a_sentence():
    with pytest.raises(pools.UnknownPool, match="no pool 'nowhere'; known are hetero-1, hetero-2, or profiles"):
        pools.pool("nowhere")


def test_a_deadline_that_95_percent_meet():
    latencies_s = [float(n) for n in range(1, 101)]
    assert bench_report.attained_s(latencies_s, 0.95) == 95.0
    assert bench_report.attained_s(latencies_s, 0.99) == 99.0
    assert bench_report.attained_s([3.0], 0.95) == 3.0


SMALL_BENCH = """
import sys
from tidegate_sim import bench_report, suite, suites
if __name__ == "__main__":
    options = suite.Options(workflows=2, seeds=1, jobs=1, rates=(1.0,), traces=("both-hetero-2",), parts=("sweep",))
    sys.stdout.write(bench_report.text(suites.load("text2sql").run(options, lambda line: None)))
"""


def test_two_processes_with_different_hash_seeds_write_the_same_bytes(tmp_path):
    (tmp_path / "bench.py").write_text(SMALL_BENCH)
    runs = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "bench.py")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    (first, complaint), (second, _) = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], complaint
    assert first == second
    assert json.loads(first)["sweep"]


def test_the_followers_of_a_shed_call_are_shed_too():
    pool = {EngineId("only"): COST}
    call = {"arrival_s": 0.0, "prompt_tokens": 2000, "output_tokens": 500}
    calls = [
        trace_format.TraceCall(id="runs", **call),
        trace_format.TraceCall(id="waits", **call, deadline_s=0.1),
        trace_format.TraceCall(id="follows", **call, after=("waits",)),
    ]
    outcome = ran(calls, row(policy="fcfs", max_inflight=1), pool)
    assert {item.id: item.shed is not None for item in outcome.calls} == {"runs": False, "waits": True, "follows": True}


def test_a_row_with_vllms_own_scheduler_takes_its_policies_only():
    with pytest.raises(ValueError, match="has the policies fcfs and priority, not 'urgency'"):
        replace(row(policy="urgency"), stock_scheduler=True)
