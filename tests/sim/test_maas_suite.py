"""The suite about steering: its traces, its figures and its oracle."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from tidegate_policy import policies
from tidegate_sim import cell, maas_ablations, maas_figures, maas_policies, maas_traces, suite
from tidegate_sim.suites import maas
from tidegate_sim.trace_format import BadTrace, TraceCall

AZURE = [
    TraceCall(id=f"a{n}", arrival_s=0.3 * n, prompt_tokens=100 + n % 7, output_tokens=20 + n % 300) for n in range(3000)
]


def rates(name: str, edges: list[float]) -> list[float]:
    """Calls a second between the instants of `edges`, over ten seeds, at a base load of 4."""
    traces = [maas_traces.trace(name, seed, 4.0, AZURE) for seed in range(10)]
    return [
        fmean(sum(low <= call.arrival_s < high for call in calls) / (high - low) for calls in traces)
        for low, high in itertools.pairwise(edges)
    ]


def test_the_stress_has_the_arrival_rates_of_equation_13() -> None:
    steady, surge, on, off = (
        rates("stress", [0, 200, 400])[0],
        rates("stress", [200, 400])[0],
        *rates("stress", [420, 430, 440]),
    )
    assert steady == pytest.approx(0.6 * 4, rel=0.1)
    assert surge == pytest.approx(1.4 * 4, rel=0.1)
    assert on == pytest.approx(1.8 * 4, rel=0.25)
    assert off == pytest.approx(0.2 * 4, rel=0.6)


def test_bursts_do_not_change_the_mean_load() -> None:
    assert rates("burst", [0, 600])[0] == pytest.approx(4.0, rel=0.05)
    assert rates("burst", [54, 60])[0] > 4 * rates("burst", [0, 54])[0]


def test_greater_importance_means_tighter_targets_within_a_fifth_of_the_base() -> None:
    calls = maas_traces.trace("stress", 1, 4.0)
    for call in calls:
        base = maas_traces.TASKS[call.task_type]
        assert 0.8 * base.ttft_ms - 1 <= call.ttft_slo_ms <= 1.2 * base.ttft_ms
        assert call.tpot_slo_ms / base.tpot_ms == pytest.approx(call.ttft_slo_ms / base.ttft_ms, abs=0.02)
    factors = [call.ttft_slo_ms / maas_traces.TASKS[call.task_type].ttft_ms for call in calls]
    assert min(factors) < 0.85
    assert max(factors) > 1.15


def test_the_task_drift_goes_from_short_to_long_answers() -> None:
    calls = maas_traces.trace("task-drift", 1, 4.0, AZURE)
    short, long, _ = (
        fmean(call.output_tokens for call in calls if 200 * phase <= call.arrival_s < 200 * (phase + 1))
        for phase in range(3)
    )
    assert long > 2 * short


def test_a_replay_keeps_lengths_and_bursts_and_fills_the_trace_at_its_rate() -> None:
    calls = maas_traces.trace("replay", 1, 4.0, AZURE)
    assert len(calls) == 4 * 600
    assert 0 <= calls[0].arrival_s < calls[-1].arrival_s < 600
    known = {call.id: call for call in AZURE}
    assert all(call.output_tokens == known[call.id].output_tokens for call in calls)
    with pytest.raises(BadTrace, match="needs more than 2400 calls"):
        maas_traces.trace("replay", 1, 4.0, AZURE[:100])


@pytest.mark.parametrize("name", maas_traces.NAMES)
def test_a_trace_depends_on_its_seed_alone(name: str) -> None:
    random.seed(3)
    first = maas_traces.trace(name, 7, 2.0, AZURE)
    assert maas_traces.trace(name, 7, 2.0, AZURE) == first
    assert maas_traces.trace(name, 8, 2.0, AZURE) != first


def test_no_seed_of_the_published_table_is_a_development_seed() -> None:
    assert not set(maas.DEVELOPMENT_SEEDS) & set(range(maas.FIRST_SEED, maas.FIRST_SEED + maas.SEEDS))


def call(name: str, arrival_s: float, **more: object) -> TraceCall:
    return replace(
        TraceCall(id=name, arrival_s=arrival_s, prompt_tokens=100, output_tokens=11, ttft_slo_ms=1000, tpot_slo_ms=100),
        **more,
    )


def ended(item: TraceCall, ttft_s: float | None, tpot_s: float = 0.05) -> cell.CallOutcome:
    first_at_s = None if ttft_s is None else item.arrival_s + ttft_s
    return cell.CallOutcome(
        id=item.id,
        workflow=None,
        stage=None,
        tenant="",
        slo_class="",
        urgency=None,
        arrived_at_s=item.arrival_s,
        started_at_s=item.arrival_s,
        first_at_s=first_at_s,
        finished_at_s=None if first_at_s is None else first_at_s + tpot_s * (item.output_tokens - 1),
        output_tokens=item.output_tokens,
    )


def outcome(*calls: cell.CallOutcome) -> cell.Outcome:
    return cell.Outcome(
        calls=calls,
        latencies_s=(),
        finished_s=(),
        queued_share=0.0,
        preemptions=0,
        steps=0,
        busy_share={},
        calls_on={},
        switches=((30.0, "sjf", "overload: x"),),
    )


def test_the_selectors_choose_among_the_policies_that_a_serving_pool_allows_by_default() -> None:
    text = (Path(__file__).parents[2] / "crds" / "servingpools.tidegate.dev.yaml").read_text()
    (resource,) = yaml.safe_load_all(text)
    schema = resource["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert tuple(schema["properties"]["spec"]["properties"]["policy"]["properties"]["allow"]["default"]) == maas.ALLOW
    for name, row in maas.SUITE.everywhere.items():
        if name.startswith("selector "):
            assert row.steering is not None
            assert row.steering.allow == maas.ALLOW


def test_a_call_counts_only_when_both_targets_are_met() -> None:
    calls = [call("good", 1.0), call("late", 2.0), call("slow", 3.0), call("shed", 4.0)]
    found = maas_figures.figures(
        calls,
        outcome(ended(calls[0], 0.5), ended(calls[1], 1.5), ended(calls[2], 0.5, 0.2), ended(calls[3], None)),
        60.0,
    )
    assert found["attainment"] == 0.25
    assert found["goodput"] == pytest.approx(1 / 60)
    assert found["ttft_compliance"] == 0.5
    assert found["met_by_window"] == [1, 0]
    assert found["switches_an_hour"] == 60


def test_the_gain_of_a_late_call_falls_with_its_completion() -> None:
    calls = [call("one", 0.0)]
    on_time = maas_figures.figures(calls, outcome(ended(calls[0], 0.5)), 60.0)["esg"]
    late = maas_figures.figures(calls, outcome(ended(calls[0], 3.65, 0.05)), 60.0)["esg"]
    assert on_time == 1.0
    assert late == pytest.approx(2.1 / (3.65 + 11 * 0.05))


def test_the_mismatch_is_zero_while_tokens_are_served_as_they_come_and_positive_while_they_wait() -> None:
    calls = [call(f"c{second}", float(second)) for second in range(60)]
    prompt = maas_figures.figures(calls, outcome(*(ended(item, 0.1, 0.01) for item in calls)), 60.0)
    waiting = maas_figures.figures(
        calls, outcome(*(replace(ended(item, 20.0), started_at_s=item.arrival_s + 19) for item in calls)), 60.0
    )
    assert prompt["mismatch"] < 0.15
    assert waiting["mismatch"] > 1.0


def test_drop_and_recovery_compare_the_thirds_of_the_trace() -> None:
    calls = [call(f"c{second}", float(second)) for second in range(60)]
    ends = [ended(item, 0.5 if item.arrival_s < 30 or item.arrival_s >= 50 else 5.0) for item in calls]
    found = maas_figures.figures(calls, outcome(*ends), 60.0)
    assert found["phases"] == [1.0, 0.5, 0.5]
    assert found["drop"] == 0.5
    assert found["recovery"] == 1.0


def test_the_oracle_takes_the_best_policy_of_each_window() -> None:
    assert maas.oracle({"edf": [5, 1, 3], "sjf": [2, 4, 3]}) == 5 + 4 + 3


def test_traces_from_azure_need_the_file() -> None:
    with pytest.raises(BadTrace, match="the trace replay needs --trace-file"):
        maas.SUITE.run(suite.Options(traces=("replay",)), lambda line: None)
    with pytest.raises(OSError, match="No such file"):
        maas.SUITE.run(
            suite.Options(traces=("replay",), trace_file=Path("/nowhere.csv"), seeds=1, jobs=1), lambda line: None
        )


def test_the_table_of_a_short_run_has_every_row() -> None:
    options = suite.Options(traces=("burst",), rates=(1.0,), workflows=40, seeds=1, jobs=1, checked_share=0.0)
    report = maas.SUITE.run(options, lambda line: None)
    text = maas.SUITE.table(report)
    for row in maas.SUITE.everywhere:
        assert f"\n{row} " in text
    for row in maas.SUITE.rows.keys() - maas.SUITE.everywhere.keys():
        assert f"\n{row} " not in text
    assert report["pools"][0]["traces"]["burst"]["sjf"]["regret"]["mean"] >= 0


def test_the_part_policies_runs_every_policy_fixed_and_no_selector() -> None:
    options = suite.Options(
        traces=("burst",), rates=(1.0,), workflows=40, seeds=2, jobs=1, checked_share=0.0, parts=(maas.POLICIES,)
    )
    report = maas.SUITE.run(options, lambda line: None)
    assert report["scheduler"]["cells"] == 2 * len(policies.POLICIES)
    assert "overall" not in report["pools"][0]
    found = report["pools"][0]["policies"]
    assert list(found["traces"]["burst"]) == list(policies.POLICIES)
    for other in maas_policies.REFERENCES:
        assert list(found["over"][other]) == list(policies.POLICIES)
        assert found["over"][other][other] == {"mean": 1.0, "low": None, "high": None, "seeds": 2}
    assert all(maas.SUITE.rows[name].steering is None for name in policies.POLICIES)
    text = maas.SUITE.table(report)
    for name in policies.POLICIES:
        assert f"\n{name} " in text
    assert "selector" not in text


def test_policies_are_compared_by_the_sum_of_their_traces_seed_by_seed_and_listed_best_first() -> None:
    runs = {}
    for index, row in enumerate(maas_policies.ROWS):
        for name in ("stress", "shift"):
            for seed in (1, 2):
                goodput = 1.0 if row == "sjf" else 0.5 - index / 100
                runs[f"{name}/{seed}", row] = {"goodput": goodput * seed, "attainment": goodput, "esg": goodput}
    found = maas_policies.compared(runs, ("stress", "shift"), (1, 2))
    assert found["over"]["sjf"]["fcfs"]["mean"] == pytest.approx(0.5)
    assert found["traces"]["shift"]["fcfs"]["goodput"]["mean"] == pytest.approx(0.75)
    lines = maas_policies.table("title", found).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["sjf", "fcfs", "edf"]


def test_the_ablations_run_on_their_trace_and_are_divided_by_the_whole_product() -> None:
    options = suite.Options(
        traces=(maas_ablations.TRACE,), rates=(1.0,), workflows=40, seeds=1, jobs=1, checked_share=0.0
    )
    report = maas.SUITE.run(options, lambda line: None)
    found = report["pools"][0]["ablations"]
    assert list(found) == [each.row for each in maas_ablations.TABLE]
    assert all(found[row][figure]["mean"] > 0 for row in found for figure in maas_ablations.FIGURES)
    text = maas.SUITE.table(report)
    for each in maas_ablations.TABLE:
        assert each.paper in text


def test_an_ablation_leaves_out_one_part_and_keeps_the_rest() -> None:
    rows = maas.SUITE.rows
    whole = rows[maas_ablations.WHOLE]
    assert whole.steering is not None
    lanes, guards = rows[maas_ablations.WITHOUT_LANES].steering, rows[maas_ablations.WITHOUT_GUARDS].steering
    assert lanes is not None
    assert guards is not None
    assert set(whole.steering.allow) - set(lanes.allow) == {"two-lane"}
    assert guards.guards.dwell_s == 0
    assert replace(lanes, allow=whole.steering.allow) == replace(guards, guards=whole.steering.guards) == whole.steering
    assert replace(rows[maas_ablations.WITH_LOOPS], regulators=()) == whole


def test_the_calls_of_the_row_without_names_of_tasks_have_their_targets_and_no_class() -> None:
    calls = [call("one", 1.0, slo_class="qa")]
    assert maas_ablations.trace(maas_ablations.WHOLE, calls) == calls
    (untold,) = maas_ablations.trace(maas_ablations.WITHOUT_TASKS, calls)
    assert untold == replace(calls[0], slo_class="")


def test_the_tail_latencies_are_those_of_the_calls_that_started() -> None:
    calls = [call(f"c{second}", float(second)) for second in range(20)]
    ends = [ended(item, 0.5 + item.arrival_s / 100, 0.02) for item in calls[:-1]]
    found = maas_figures.figures(calls, outcome(*ends, ended(calls[-1], None)), 60.0)
    assert found["ttft_95_s"] == pytest.approx(0.68)
    assert found["tpot_95_s"] == pytest.approx(0.02)
