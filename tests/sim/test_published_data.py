"""The suites `relquery` and `augmented` on data sets of their public formats: made-up ones, and the published ones where
they are."""

import gzip
import json
import random

import pytest

from tidegate_sim import bench, relational_queries, suite, suites, tool_sessions, trace_format

COLUMNS = "request_id,tool,segment,prompt_tokens,completion_tokens,api_time_s,api_return_tokens\n"
WORKLOADS = {"relquery": "opt-published", "augmented": "rtx4090-published"}
PUBLISHED = {"relquery": "relational_prompts/prompts.jsonl.gz", "augmented": "augmented_merge/segments.csv.gz"}


@pytest.fixture
def made_up(tmp_path):
    """A small file of each format. Whatever belongs to the half that the gateway learns from is odd: odd numbers of prompt
    tokens, odd rows and sessions."""
    sessions = [
        f"{n},{'ab'[n // 2 % 2]},0,{100 + n},{10 + n},{0.5 + n},20\n{n},x,1,{140 + 2 * n},7,,\n" for n in range(12)
    ]
    rows = [
        {
            "dataset": "d",
            "template": template,
            "prompt": f"{template} {number} of the rows",
            "prompt_tokens": 40 + number,
            "output_tokens": 3 + number,
        }
        for template in ("one", "two")
        for number in range(10)
    ]
    files = {"augmented": COLUMNS + "".join(sessions), "relquery": "".join(json.dumps(row) + "\n" for row in rows)}

    def written(name):
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress(files[name].encode()))
        return path

    return written


def ran(name, path, **more):
    options = suite.Options(
        traces=(WORKLOADS[name],), rates=(2.0,), parts=("sweep",), trace_file=path, jobs=1, checked_share=0.0,
        **{"workflows": 4, "seeds": 2, **more},
    )  # fmt: skip
    found = suites.load(name)
    return found, found.run(options, lambda line: None)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_suite_runs_all_rows_on_a_file_of_the_public_format_and_says_what_is_real(name, made_up):
    found, report = ran(name, made_up(name))
    (load,) = report["sweep"]
    assert load["workload"] == WORKLOADS[name]
    assert set(load["rows"]) == set(found.rows)
    table = found.table(report)
    for note in found.published_notes:
        assert note in table


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_suite_runs_on_the_published_file(name, published):
    found = suites.load(name)
    key = suite.CellKey(
        suite=name,
        pool=found.workloads[WORKLOADS[name]].pool,
        row=name,
        trace=f"{WORKLOADS[name]}/1",
        rate=2.0,
        workflows=3,
        trace_file=published(PUBLISHED[name]),
    )
    assert 0 <= suite.run_cell(key)["slo_met"] <= 1


def test_sessions_keep_their_lengths_tools_and_times_and_only_the_instants_of_arrival_are_drawn(made_up):
    path = made_up("augmented")
    calls = tool_sessions.sampled(path, random.Random(1), half=1, sessions=50, rate=2.0)
    firsts, seconds = calls[::2], calls[1::2]
    assert {call.prompt_tokens for call in firsts} == {101, 103, 105, 107, 109, 111}
    for first, second in zip(firsts, seconds, strict=True):
        number = first.prompt_tokens - 100
        assert (first.output_tokens, first.tool.duration_s, first.tool.return_tokens) == (10 + number, 0.5 + number, 20)
        assert first.tool.name == first.slo_class == "ab"[number // 2 % 2]
        assert (second.prompt_tokens, second.after, second.tool) == (140 + 2 * number, (first.id,), None)
    assert 15 < firsts[-1].arrival_s < 40
    assert [call.arrival_s for call in firsts] == sorted(call.arrival_s for call in firsts)
    assert calls != tool_sessions.sampled(path, random.Random(2), half=1, sessions=50, rate=2.0)


def test_rows_keep_their_lengths_and_share_the_beginning_of_their_template(made_up):
    calls = relational_queries.imported(made_up("relquery"), random.Random(1), queries=40, rate=1.0, half=1)
    assert {call.prompt_tokens for call in calls} == {41, 43, 45, 47, 49}
    assert all(call.output_tokens == call.prompt_tokens - 37 for call in calls)
    assert (
        len({(call.slo_class, call.prefix[0][0]) for call in calls}) == len({call.prefix[0][0] for call in calls}) == 2
    )
    assert all(call.prefix[0][1] == round(call.prompt_tokens * 4 / 17) for call in calls)
    for query in {call.relquery for call in calls}:
        rows = [call.prompt_tokens for call in calls if call.relquery == query]
        assert len(rows) == len(set(rows)), "a relQuery has a row once"


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_gateway_learns_from_another_half_than_the_one_that_runs(name, made_up):
    path = made_up(name)
    found = suites.load(name)
    key = suite.CellKey(
        suite=name, pool="p", row="vLLM, FCFS", trace=f"{WORKLOADS[name]}/1", rate=1.0, workflows=30, trace_file=path
    )

    def first_prompts(calls):
        return {(call.slo_class, call.prompt_tokens, call.output_tokens) for call in calls if not call.after}

    learned, runs = first_prompts(found.learned_from_file(path)), first_prompts(found.trace(key))
    assert learned
    assert runs
    assert not learned & runs


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["augmented", "--traces", "rtx4090-published"], "needs --trace-file"),
        (["semantic", "--trace-file", "FILE"], "reads --trace-file"),
        (["augmented", "--traces", "rtx4090-poisson", "--trace-file", "FILE"], "reads --trace-file"),
        (
            ["relquery", "--trace-file", "FILE", "--jobs", "1", "--workflows", "1", "--seeds", "1"],
            "not the relational prompts",
        ),
    ],
)
def test_a_file_that_is_missing_unread_or_of_another_format_gives_one_sentence(words, complaint, made_up, capsys):
    path = str(made_up("augmented"))
    words = [path if word == "FILE" else word for word in words]
    assert bench.main([*words, "--checked-share", "0"]) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_a_file_with_one_session_is_too_small(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text(COLUMNS + "a,qa,0,10,5,,\n")
    with pytest.raises(trace_format.BadTrace, match="fewer than two sessions"):
        tool_sessions.sampled(path, random.Random(1), half=1, sessions=1, rate=1.0)
