"""Engines that come and go in virtual time, the algorithm of the HPA, and what the suite `autoscaling` makes of both."""

import dataclasses
import functools

import pytest

import tidegate_profiles
from tidegate_policy import cost, gateway_core
from tidegate_policy.dispatch import waiting_limits
from tidegate_policy.model import Call, CallId
from tidegate_policy.scale import call_load
from tidegate_sim import cell, hpa, scale_traces, scaled_cell, scalers, suite, suites, trace_format
from tidegate_sim.trace_format import TraceCall

COST = cost.CostModel(step_s=0.02, prefill_s=1e-4, decode_s=1e-4, kv_tokens=40_000, max_batch=32)
KIND = scaled_cell.EngineKind(name="fast", cost=COST, gpus=2, gpu_price=3.0, start_s=60.0, high=6)
ROW = cell.Row(gateway=gateway_core.CoreSettings(limits=waiting_limits.Limits(hold_s=3600.0)), model="fast")


class Plan:
    """A scaler that knows the numbers beforehand."""

    period_s = 5.0

    def __init__(self, *steps):
        self.steps = steps

    def sample(self, now, fleet):
        pass

    def wanted(self, now, fleet):
        return {"fast": [count for from_s, count in self.steps if from_s <= now][-1]}


def calls(*instants, tokens=100, **more):
    return [
        TraceCall(id=f"c{index}", arrival_s=at_s, prompt_tokens=500, output_tokens=tokens, **more)
        for index, at_s in enumerate(instants)
    ]


def run(scaler, trace, *, first=0, length_s=600.0):
    cell_ = scaled_cell.ScaledCell([KIND], {"fast": first}, scaler, ROW, (), seed=1, length_s=length_s)
    outcome = {each.id: each for each in cell_.run(trace).calls}
    return outcome, cell_.bill()


def test_a_call_waits_for_the_first_engine_which_serves_after_its_start_time():
    outcome, bill = run(Plan((0, 0), (10, 1)), calls(0.0))
    assert outcome["c0"].shed is None
    assert 70.0 <= outcome["c0"].first_at_s < 71.0
    assert bill.gpu_hours == pytest.approx(2 * 590 / 3600)
    assert bill.cost == pytest.approx(3.0 * bill.gpu_hours)
    assert (bill.starts, bill.most_engines, bill.changes) == (1, 1, (10.0,))


def test_an_engine_that_goes_finishes_its_calls_and_is_paid_for_until_then():
    long = calls(0.0, tokens=2000)  # about 40 s
    outcome, bill = run(Plan((0, 1), (5, 0)), long, first=1)
    ended_s = outcome["c0"].finished_at_s
    assert ended_s > 30.0
    assert bill.gpu_hours == pytest.approx(2 * ended_s / 3600, rel=1e-3)


def test_an_engine_that_goes_gets_no_further_calls():
    trace = calls(66.0, 67.0, 80.0, 81.0, tokens=2000)
    outcome, _ = run(Plan((0, 1), (5, 2), (70, 1)), trace, first=1)
    assert {outcome["c0"].engine, outcome["c1"].engine} == {"fast-1", "fast-2"}
    later = {outcome["c2"].engine, outcome["c3"].engine}
    assert later == {"fast-1"}, "the engine that came last goes first"


def test_an_engine_that_is_not_ready_is_cancelled_first_and_never_serves():
    _, bill = run(Plan((0, 1), (10, 3), (20, 1)), calls(0.0), first=1)
    assert bill.starts == 2
    assert bill.gpu_hours == pytest.approx(2 * (600 + 2 * 10) / 3600)


def test_engines_that_go_at_the_start_cost_nothing():
    _, bill = run(Plan((0, 1)), calls(0.0), first=3)
    assert bill.gpu_hours == pytest.approx(2 * 600 / 3600)


def test_the_hpa_does_what_the_documentation_of_kubernetes_computes():
    controller = functools.partial(hpa.Hpa, low=1, high=20)
    assert controller().by_pods(0.0, [0.9, 0.9], 0, 0.45) == 4  # twice the target
    assert controller().by_pods(0.0, [0.88, 0.86], 0, 0.8) == 2, "within the tolerance of 10%"
    assert controller().by_pods(0.0, [1.0, 1.0], 2, 0.8) == 4, "pods that start count as 0 on the way up"
    assert controller().by_pods(0.0, [1.0] * 4, 0, 0.1) == 8, "at most twice as many, or four more"
    assert controller().by_total(0.0, 11.0, 2, 2.0) == 6
    assert controller().by_total(0.0, 4.2, 2, 2.0) == 2, "within the tolerance"


def test_the_hpa_goes_down_by_the_greatest_recommendation_of_five_minutes():
    controller = hpa.Hpa(low=1, high=20)
    assert controller.by_pods(0.0, [0.8] * 6, 0, 0.8) == 6
    found = [controller.by_pods(at_s, [0.2] * 6, 0, 0.8) for at_s in (15.0, 150.0, 299.0, 301.0)]
    assert found == [6, 6, 6, 2]
    assert controller.by_pods(400.0, [0.0] * 2, 0, 0.8) >= 1


def test_the_product_starts_engines_for_more_load_and_a_fixed_number_does_not():
    trace = [
        TraceCall(
            id=f"c{index}",
            arrival_s=index * 0.05,
            prompt_tokens=800,
            output_tokens=150,
            ttft_slo_ms=2000,
            tpot_slo_ms=100,
        )
        for index in range(9000)
    ]  # 20 calls a second for 450 s: about four engines
    task = scalers.Task(kinds=[KIND], calls=trace, length_s=450.0, tpot_s=0.1, objective=0.95, first={"fast": 2})
    ours, bill = run(scalers.Tidegate(task), trace, first=2, length_s=450.0)
    assert 4 <= bill.most_engines <= 6
    late = [each for each in ours.values() if each.arrived_at_s > 350]
    met = [scaled_cell.meets_targets(item, ours[item.id]) for item in trace if item.arrival_s > 350]
    assert len(late) == len(met)
    assert sum(met) / len(met) > 0.95
    need = scalers.Need.of(task)
    assert need.mean() == need.peak() == {"fast": need.by_minute()[10]["fast"]}
    assert 4 <= need.mean()["fast"] <= bill.most_engines


@pytest.mark.parametrize("profile", ["a100-40-llama2-70b-tp4", "a5000-qwen1.5-7b"])
def test_the_predicted_seconds_of_an_engine_agree_with_what_a_saturated_engine_serves(profile):
    model = cost.from_mapping(tidegate_profiles.load(profile)["cost"])
    trace = [dataclasses.replace(call, arrival_s=0.0) for call in scale_traces.learned(200)]
    kind = dataclasses.replace(KIND, cost=model)
    saturated = scaled_cell.ScaledCell([kind], {"fast": 1}, Plan((0, 1)), ROW, (), seed=1, length_s=5.0)
    served = saturated.run(trace)
    load = call_load.of_calls(
        Call(
            id=CallId(call.id),
            arrived_at_s=0.0,
            prompt_tokens=call.prompt_tokens,
            output_predicted=call.output_tokens,
        )
        for call in trace
    )
    seconds = call_load.engine_seconds(load, model)
    assert seconds <= max(served.finished_s) <= 1.3 * seconds, "the last calls do not fill a batch"


def test_the_oracle_has_engines_in_time():
    trace = calls(*(300 + index * 0.02 for index in range(2000)))
    task = scalers.Task(kinds=[KIND], calls=trace, length_s=400.0, tpot_s=None, objective=0.95, first={"fast": 0})
    outcome, bill = run(scalers.Oracle(task), trace, length_s=400.0)
    first = min(each.first_at_s - each.arrived_at_s for each in outcome.values())
    assert first < 1.0
    assert bill.gpu_hours < bill.most_engines * 2 * 200 / 3600


@pytest.mark.parametrize("name", scale_traces.SHAPES)
def test_a_trace_depends_on_its_seed_alone_and_has_the_load_of_its_shape(name):
    one, other = (scale_traces.trace(name, 1, 3.0) for _ in range(2))
    assert one == other
    assert one != scale_traces.trace(name, 2, 3.0)
    assert [call.arrival_s for call in one] == sorted(call.arrival_s for call in one)
    assert one[-1].arrival_s <= scale_traces.length_s(name)


def test_traces_of_azure_keep_its_lengths_and_have_the_load_that_is_asked_for(published):
    azure = tuple(trace_format.from_azure(published("azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz")))
    lengths = {(call.prompt_tokens, call.output_tokens) for call in azure}
    for name in scale_traces.FROM_AZURE:
        found = scale_traces.trace(name, 1, 3.0, azure)
        assert len(found) == pytest.approx(3.0 * 3600, rel=0.03)
        assert all((call.prompt_tokens, call.output_tokens) in lengths for call in found if call.prompt_tokens < 8000)
    with pytest.raises(trace_format.BadTrace, match="and 30 are asked for"):
        scale_traces.trace("azure", 1, 30.0, azure)


def test_the_suite_prints_paired_differences_and_the_rows_that_are_asked_for(monkeypatch):
    found = suites.load("autoscaling")
    short = scale_traces.Shape(length_s=240.0, load=lambda length_s, rng: lambda at_s: 0.4 if at_s < 120 else 0.8)
    monkeypatch.setitem(scale_traces.SHAPES, "short", short)
    options = suite.Options(jobs=1, traces=["short"], seeds=2, parts=["main"], checked_share=0.0)
    report = found.run(options, lambda line: None)
    (pool,) = report["pools"]
    rows = pool["traces"]["short"]
    assert set(rows) == {
        "static, mean",
        "static, peak",
        "HPA, KV memory 80%",
        "HPA, KV memory 60%",
        "tidegate",
        "oracle",
    }
    assert rows["tidegate"]["cost_times_ours"] == {"mean": 1.0, "low": None, "high": None, "seeds": 2}
    assert 0 <= rows["oracle"]["attainment"]["mean"] <= 1
    table = found.table(report)
    assert "cost over tidegate's" in table
    assert "seeds 3901 to 3902" in table
