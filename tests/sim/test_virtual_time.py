"""Virtual time: the loop, an engine in it, and a pool behind the dispatcher."""

import json
import os
import random
import subprocess
import sys

import pytest

from tidegate_sim import report
from tidegate_sim.virtual_time import Loop

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from tidegate_policy import choose
from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId, EngineId
from tidegate_sim import cluster, history, pools, text2sql, traces
from tidegate_sim import virtual_engine as engine

pytestmark = pytest.mark.vllm

COST = CostModel(step_s=0.02, prefill_s=1e-4, attention_s=1e-9, decode_s=1e-4, context_s=1e-7, kv_tokens=64_000)


def test_events_run_in_the_order_of_their_instants_and_then_of_asking():
    loop, seen = Loop(), []
    for name, delay_s in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        loop.after(delay_s, lambda name=name: seen.append((name, loop.now())))
    loop.run()
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_an_event_cannot_be_in_the_past():
    with pytest.raises(ValueError, match="in the past"):
        Loop().after(-1.0, lambda: None)


class Heard:
    def __init__(self, loop):
        self.loop, self.tokens, self.ended = loop, {}, {}

    def on_tokens(self, call_id, produced):
        self.tokens.setdefault(call_id, []).append((self.loop.now(), produced))

    def on_end(self, call_id):
        self.ended[call_id] = self.loop.now()


def alone(prompt, output, cost=COST):
    loop = Loop()
    heard = Heard(loop)
    machine = engine.VirtualEngine(loop, cost, policy="urgency", listener=heard)
    machine.submit(Call(id=CallId("a"), arrival_s=0.0, prompt_tokens=prompt, output_predicted=9), output)
    loop.run()
    return heard, machine


@pytest.mark.parametrize(("prompt", "output"), [(100, 1), (100, 40), (20_000, 5)])
def test_a_call_alone_takes_what_the_cost_model_says(prompt, output):
    heard, machine = alone(prompt, output)
    call = Call(id=CallId("a"), arrival_s=0.0, prompt_tokens=prompt, output_predicted=output)
    assert heard.ended["a"] == pytest.approx(COST.call_seconds(call), rel=1e-3)
    assert machine.busy_s == pytest.approx(heard.ended["a"])


def test_an_answer_has_its_true_length_whatever_was_predicted():
    heard, _ = alone(100, 40)
    assert [produced for _, produced in heard.tokens["a"]] == list(range(1, 40))


def test_a_shared_prefix_is_computed_once():
    loop = Loop()
    heard = Heard(loop)
    machine = engine.VirtualEngine(loop, COST, policy="fcfs", listener=heard)
    for name, at_s in (("first", 0.0), ("second", 5.0)):
        call = Call(id=CallId(name), arrival_s=at_s, prompt_tokens=4000, output_predicted=1)
        loop.after(at_s, lambda call=call: machine.submit(call, 1, prefixes=((7, 3904),)))
    loop.run()
    assert heard.ended["first"] > 0.4
    assert heard.ended["second"] - 5.0 < 0.1


def setting(rule="score", policy="urgency", **more):
    return cluster.Setting(dispatch=choose.Dispatch(rule=rule), policy=policy, **more)


def ran(calls, chosen, pool=None):
    engines = pool or pools.pool("hetero-1")
    learned = text2sql.trace(random.Random(9), [text2sql.FINANCIAL], workflows=20, rate=1.0, name="learned")
    known = history.learn(learned, list(engines.values()))
    return cluster.Cluster(engines, chosen, known, seed=1).run(calls)


def workflows(count=4, rate=0.5):
    return text2sql.trace(random.Random(5), [text2sql.FINANCIAL], workflows=count, rate=rate, name="t")


def test_every_workflow_of_a_trace_ends():
    calls = workflows()
    outcome = ran(calls, setting())
    assert len(outcome.latencies_s) == 4
    assert sum(outcome.calls_on.values()) == len(calls)
    assert list(outcome.finished_s) == sorted(outcome.finished_s)


def test_round_robin_gives_each_engine_its_turn():
    outcome = ran(workflows(), setting(rule="round-robin"))
    assert max(outcome.calls_on.values()) - min(outcome.calls_on.values()) <= 1


def test_a_cap_keeps_calls_in_the_gateway_and_still_serves_them_all():
    pool = {EngineId("only"): COST}
    calls = [
        traces.TraceCall(id=f"c{n}", arrival_s=0.0, prompt_tokens=2000, output_tokens=5, deadline_s=50.0)
        for n in range(30)
    ]
    early = ran(calls, setting(policy="fcfs"), pool)
    late = ran(calls, setting(policy="fcfs", cap=0.01), pool)
    assert len(late.latencies_s) == 30
    assert early.queued_share > late.queued_share


def test_a_tool_between_calls_takes_its_time():
    tool = traces.Tool(name="sql", duration_s=100.0)
    calls = [
        traces.TraceCall(id="a", arrival_s=0.0, prompt_tokens=10, output_tokens=1, workflow="w", tool=tool),
        traces.TraceCall(id="b", arrival_s=7.0, prompt_tokens=10, output_tokens=1, workflow="w", after=("a",)),
    ]
    (latency_s,) = ran(calls, setting()).latencies_s
    assert latency_s == pytest.approx(107.0, abs=0.5)


def test_the_history_is_of_the_trace_that_it_learned_from():
    engines = list(pools.pool("hetero-1").values())
    calls = [
        traces.TraceCall(id="a", arrival_s=0.0, prompt_tokens=1000, output_tokens=10, workflow="w", stage="one"),
        traces.TraceCall(
            id="b", arrival_s=0.0, prompt_tokens=1000, output_tokens=30, workflow="w", stage="two", after=("a",)
        ),
        traces.TraceCall(
            id="c", arrival_s=0.0, prompt_tokens=1000, output_tokens=50, workflow="w", stage="two", after=("a",)
        ),
    ]
    known = history.learn(calls, engines)
    assert (known.output_of("one"), known.output_of("two")) == (10, 40)
    assert known.output_of("never seen") == history.UNKNOWN_OUTPUT_TOKENS
    slowest = Call(id=CallId("c"), arrival_s=0.0, prompt_tokens=1000, output_predicted=50)
    assert known.tail_of("one") == pytest.approx(sum(model.call_seconds(slowest) for model in engines) / len(engines))
    assert known.tail_of("two") == 0.0


def test_an_unknown_pool_is_a_sentence():
    with pytest.raises(pools.UnknownPool, match="no pool 'nowhere'; known are hetero-1, hetero-2, or profiles"):
        pools.pool("nowhere")


def test_a_deadline_that_95_percent_meet():
    latencies_s = [float(n) for n in range(1, 101)]
    assert report.attained_s(latencies_s, 0.95) == 95.0
    assert report.attained_s(latencies_s, 0.99) == 99.0
    assert report.attained_s([3.0], 0.95) == 3.0


SMALL_BENCH = """
import sys
from tidegate_sim import report
from tidegate_sim.suites import text2sql
if __name__ == "__main__":
    options = text2sql.Options(workflows=2, jobs=1, pools=("hetero-2",), rates=(1.0,), traces=("both",))
    sys.stdout.write(report.text(text2sql.run(options)))
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
    assert json.loads(first)["cells"]
