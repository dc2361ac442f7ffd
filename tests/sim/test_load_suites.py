"""The suites that compare rows under several loads: a small part of each, and what they share."""

import gzip
import itertools
import json
import random
from dataclasses import replace

import pytest

from tidegate_sim import (
    bench,
    bench_report,
    load_suite,
    paired_difference,
    perception,
    relational_queries,
    suite,
    suites,
    tool_sessions,
    trace_format,
    urgent_bursts,
)

SMALL = {"workflows": 4, "jobs": 1, "seeds": 2, "checked_share": 0.0}
FIRST = {
    "relquery": ("opt-amazon", 1.0),
    "semantic": ("a5000-4b-gap0.1", 20.0),
    "augmented": ("rtx4090-poisson", 3.0),
    "text2sql": ("financial-hetero-1", 0.5),
    "streaming": ("a100-7b", 2.0),
}


def ran(name, **more):
    workload, rate = FIRST[name]
    options = suite.Options(traces=(workload,), rates=(rate,), parts=("sweep",), **{**SMALL, **more})
    found = suites.load(name)
    return found, found.run(options, lambda line: None)


@pytest.mark.parametrize("name", sorted(FIRST))
def test_a_small_part_of_a_suite_runs_and_prints_its_rows_beside_the_papers_figures(name):
    chosen, report = ran(name)
    table = chosen.table(report)
    (load,) = report["sweep"]
    rows = set(chosen.rows) - set(chosen.sensitivity)
    assert set(load["rows"]) == rows
    for row in rows:
        assert row in table
    assert "Paper, " in table
    assert report["scheduler"]["sentence"] in table
    json.loads(bench_report.text(report))


@pytest.mark.parametrize("name", sorted(FIRST))
def test_the_same_seeds_write_the_same_bytes(name):
    first, second = (bench_report.text(ran(name, seeds=1, workflows=2)[1]) for _ in range(2))
    assert first == second


@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(FIRST))
def test_checked_cells_give_the_same_figures_on_vllms_scheduler(name):
    pytest.importorskip("vllm", reason="needs the vLLM CPU build")
    _, report = ran(name, seeds=1, workflows=2, checked_share=1.0)
    assert report["scheduler"]["checked_on_vllm"] == report["scheduler"]["cells"]
    assert report["scheduler"]["unequal"] == []


@pytest.mark.parametrize(("option", "name"), [("--traces", "nowhere"), ("--parts", "everything")])
def test_an_unknown_trace_or_part_is_answered_with_those_that_exist(option, name, capsys):
    assert bench.main(["semantic", option, name, "--checked-share", "0"]) == 1
    complaint = capsys.readouterr().err
    assert f"has no {name!r}" in complaint
    assert "sweep" in complaint or "a100-4b-gap0.1" in complaint


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["relquery", "--parts", "sensitivity"],
            "the suite relquery has no 'sensitivity' among its parts: sweep, capacity",
        ),
        (
            ["semantic", "--traces", "a100-4b-poisson", "--parts", "sweep"],
            "a100-4b-poisson: no loads in sweep; name some",
        ),
        (["text2sql", "--policy", "edf"], "the suite text2sql takes no --policy; relquery, semantic, augmented"),
    ],
)
def test_a_run_without_cells_is_one_sentence(words, says, capsys):
    assert bench.main([*words, "--checked-share", "0"]) == 1
    complaint = capsys.readouterr().err
    assert f"tidegate bench: {says}" in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("name", ["relquery", "semantic", "augmented", "streaming"])
def test_a_policy_runs_beside_the_baselines_of_a_suite_on_the_same_seeds(name, tmp_path, capsys):
    workload, rate = FIRST[name]
    words = [name, "--traces", workload, "--rates", str(rate), "--parts", "sweep", "--workflows", "4", "--seeds", "3"]
    words += ["--jobs", "1", "--checked-share", "0", "--out", str(tmp_path)]
    assert bench.main([*words, "--policy", "edf,llf"]) == 0
    table = capsys.readouterr().out
    (load,) = json.loads((tmp_path / "report.json").read_text())["sweep"]
    baselines = set(suites.load(name).baselines)
    assert set(load["rows"]) == {*baselines, "edf", "llf"}
    for policy in ("edf", "llf"):
        assert set(load["rows"][policy]["times_better"]) == baselines
        assert f"\n{policy}  " in table


def test_a_policy_runs_with_the_parameters_that_its_name_gives():
    rows = ("two-lane", "two-lane:threshold_s=4:fast_share=0.75", "two-lane:threshold_s=1")
    _, report = ran("relquery", policy=rows, workflows=12)
    default, the_same, other = (report["sweep"][0]["rows"][name] for name in rows)
    assert default == the_same
    assert default != other


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fastest", "unknown policy 'fastest'"),
        ("edf:patience_s=1", "policy 'edf' has no parameter 'patience_s'; it has none"),
        ("two-lane:fast_share=2", "must be between 0.01 and 0.99"),
        ("two-lane:fast_share", "is no parameter such as threshold_s=2 with a number"),
        ("two-lane:fast_share=nan", "must be between"),
        ("two-lane:fast_share=0.5:fast_share=0.6", "the parameter 'fast_share' is given twice"),
    ],
)
def test_a_policy_that_cannot_run_is_one_sentence(text, says, capsys):
    with pytest.raises(SystemExit):
        bench.main(["semantic", "--policy", text])
    assert says in capsys.readouterr().err


def test_a_policy_that_the_suite_has_a_row_of_gives_the_figures_of_that_row():
    _, whole = ran("semantic")
    _, chosen = ran("semantic", policy=("semantic",))
    assert chosen["sweep"][0]["rows"]["semantic"] == {
        key: value for key, value in whole["sweep"][0]["rows"]["semantic"].items() if key != "share_of_clairvoyant"
    }


def test_a_sustained_rate_is_below_the_capacity_and_falls_with_the_share_of_targets():
    found = suites.load("semantic")
    options = suite.Options(traces=("a100-4b-poisson",), parts=("sustained",), **{**SMALL, "workflows": 40, "seeds": 1})
    report = found.run(options, lambda line: None)
    rates = report["sustained"]["a100-4b-poisson"]
    assert rates["95%"]
    for row in rates["95%"]:
        assert 0 <= rates["99%"][row] <= rates["95%"][row] <= 1.2 * report["capacity"]["a100-4b-poisson"]


def test_an_interval_holds_the_mean_and_narrows_with_more_seeds():
    few, many = paired_difference.interval([1.0, 3.0] * 2), paired_difference.interval([1.0, 3.0] * 8)
    assert few["low"] < many["low"] < 2.0 == many["mean"] < many["high"] < few["high"]


def test_an_interval_of_three_seeds_takes_students_quantile_of_two_degrees():
    found = paired_difference.interval([1.0, 2.0, 3.0])
    assert found["high"] - found["mean"] == pytest.approx(4.303 / 3**0.5)


@pytest.mark.parametrize(
    ("values", "told"), [([4.0], "4.0 [no interval: 1 seed]"), ([1.0, 3.0], "2.0 [no interval: 2 seeds]")]
)
def test_fewer_than_three_seeds_have_no_interval_and_the_table_says_so(values, told):
    assert bench_report.spread(paired_difference.interval(values), 1) == told
    better = paired_difference.times_better([1.0] * len(values), [2.0] * len(values))
    assert (better["mean"], better["low"]) == (pytest.approx(2.0), None)
    assert bench_report.change(better) == f"+100.0% [{told.split('[')[1]}"


def test_the_table_of_a_suite_with_two_seeds_has_no_intervals():
    chosen, report = ran("semantic", policy=("edf",))
    table = chosen.table(report)
    assert "[no interval: 2 seeds]" in table
    assert "An interval needs 3 seeds." in table
    assert "95% intervals" not in table


def test_a_paired_comparison_does_not_see_the_spread_between_seeds():
    ours = [1.0, 10.0, 100.0]
    found = paired_difference.times_better(ours, [2 * value for value in ours])
    assert found["low"] == pytest.approx(2.0)
    assert found["high"] == pytest.approx(2.0)
    assert paired_difference.difference([2.0, 5.0], [1.0, 4.0])["mean"] == pytest.approx(1.0)


def test_the_steady_throughput_leaves_out_the_ends_of_a_trace():
    slow_start = [100.0 + n for n in range(100)]
    assert load_suite.steady_throughput(slow_start) == pytest.approx(1.0)


def test_a_predictor_without_error_tells_the_truth_and_a_bad_one_tells_every_row_the_same():
    call = trace_format.TraceCall(id="c", arrival_s=0.0, prompt_tokens=9, output_tokens=70, urgency=2)
    assert perception.Perceiver(perception.CLAIRVOYANT, 1).seen(call) == call
    wrong = perception.Perception(length_error=0.9, urgency_error=0.9)
    seen = [perception.Perceiver(wrong, 1).seen(replace(call, id=f"c{n}")) for n in range(200)]
    again = [perception.Perceiver(wrong, 1).seen(replace(call, id=f"c{n}")) for n in range(200)]
    assert seen == again
    assert sum(item.output_tokens != 70 for item in seen) > 150
    assert {item.urgency for item in seen} == {0, 1, 2, 3, 4}


def test_a_predictor_serves_calls_one_after_the_other():
    slow = perception.Perceiver(perception.Perception(latency_s=0.5), 1)
    assert [slow.delay_s(0.0), slow.delay_s(0.0), slow.delay_s(10.0)] == [0.5, 1.0, 0.5]


def test_relational_queries_have_the_papers_mean_lengths():
    calls = relational_queries.trace(random.Random(1), relational_queries.TABLES["rotten"], queries=200, rate=1.0)
    assert sum(call.prompt_tokens for call in calls) / len(calls) == pytest.approx(215, rel=0.05)
    assert sum(call.output_tokens for call in calls) / len(calls) == pytest.approx(21, rel=0.2)
    sizes = [sum(call.relquery == f"q{number}" for call in calls) for number in range(200)]
    assert min(sizes) >= 1
    assert max(sizes) <= 100


def test_bursts_come_at_their_gap_and_stay_within_their_size():
    calls = urgent_bursts.trace(random.Random(1), calls=500, gap_s=0.1, rate=0.0, largest=20)
    instants = sorted({call.arrival_s for call in calls})
    assert len(calls) == 500
    assert all(later - sooner == pytest.approx(0.1) for sooner, later in itertools.pairwise(instants))
    assert max(sum(call.arrival_s == instant for call in calls) for instant in instants) <= 20


def test_published_sessions_are_like_the_generated_ones(published):
    real = tool_sessions.imported(published("augmented_merge/segments.csv.gz"), random.Random(1), rate=2.0)
    made = tool_sessions.trace(random.Random(1), sessions=1000, rate=2.0)

    def means(calls):
        sessions = len({call.session for call in calls})
        outputs = sum(call.output_tokens for call in calls) / len(calls)
        tools = sum(call.tool.duration_s for call in calls if call.tool) / sessions
        return len(calls) / sessions, outputs, tools

    assert means(made) == pytest.approx(means(real), rel=0.25)


def test_published_relational_prompts_become_groups_of_one_template(published):
    path = published("relational_prompts/prompts.jsonl.gz")
    calls = relational_queries.imported(path, random.Random(1), queries=20, rate=1.0)
    groups = {call.relquery: {other.slo_class for other in calls if other.relquery == call.relquery} for call in calls}
    assert len(groups) == 20
    assert all(len(templates) == 1 for templates in groups.values())


def test_a_file_of_another_kind_is_no_trace(tmp_path):
    path = tmp_path / "other.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(trace_format.BadTrace, match="not the sessions with tools"):
        tool_sessions.imported(path, random.Random(1), rate=1.0)
    with pytest.raises(trace_format.BadTrace, match="not the relational prompts"):
        relational_queries.imported(path, random.Random(1), queries=1, rate=1.0)


def test_a_session_repeats_its_context_and_fits_the_models():
    calls = tool_sessions.trace(random.Random(1), sessions=200, rate=2.0)
    by_id = {call.id: call for call in calls}
    for call in calls:
        assert call.prompt_tokens == sum(tokens for _, tokens in call.prefix)
        assert call.prompt_tokens + call.output_tokens <= 2 * tool_sessions.MAX_CONTEXT
        for before in call.after:
            earlier = by_id[before]
            grown = earlier.prompt_tokens + earlier.output_tokens + earlier.tool.return_tokens
            assert call.prompt_tokens == grown
            assert call.prefix[: len(earlier.prefix)] == earlier.prefix


def test_the_steady_workload_counts_its_last_two_thirds_and_has_its_own_length():
    found = suites.load("text2sql")
    assert found.workloads["steady-hetero-1"].count == 60
    key = suite.CellKey(
        suite="text2sql", pool="hetero-1", row="WLR + FCFS", trace="steady-hetero-1/5001", rate=5.0, workflows=6
    )
    counted = suite.run_cell(key)
    all_of_them = suite.run_cell(replace(key, trace="both-hetero-1/5001"))
    assert counted["mean_s"] != all_of_them["mean_s"]
    assert 0.0 <= counted["within_3x"] <= counted["within_5x"] <= 1.0
