"""The trace format, and what is made of others."""

import random
from statistics import fmean

import pytest

from tidegate_sim import text2sql_workflows, trace_format

BOTH = (text2sql_workflows.FINANCIAL, text2sql_workflows.FORMULA1)


def made(seed=1, workflows=50):
    return text2sql_workflows.trace(random.Random(seed), BOTH, workflows=workflows, rate=0.5, name="t")


def test_what_is_written_is_read_back(tmp_path):
    calls = [
        *made(workflows=3),
        trace_format.TraceCall(
            id="full",
            arrival_s=9.5,
            prompt_tokens=7,
            output_tokens=2,
            tenant="a",
            slo_class="chat",
            urgency=0,
            ttft_slo_ms=500.0,
            prefix=((4, 16), (9, 32)),
            tool=trace_format.Tool(name="calculator", duration_s=0.5, return_tokens=3),
            text="hello",
        ),
    ]
    trace_format.write(tmp_path / "t.jsonl", calls)
    assert trace_format.read(tmp_path / "t.jsonl") == calls
    assert '"class": "chat"' in (tmp_path / "t.jsonl").read_text()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        pytest.param("{", "not JSON", id="no JSON"),
        pytest.param("[1]", "a call is an object, not list", id="no object"),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "urgency": 9}',
            "urgency must be from 0 to 4, not 9",
            id="urgency",
        ),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "stage": "s"}',
            "stage needs workflow",
            id="stage",
        ),
        pytest.param('{"id": "a"}', "arrival_s is required", id="missing"),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": "9", "output_tokens": 1}', "whole number", id="type"
        ),
        pytest.param('{"id": "a", "arrival_s": -1, "prompt_tokens": 9, "output_tokens": 1}', "from 0", id="past"),
        pytest.param('{"id": "a", "arrival_s": NaN, "prompt_tokens": 9, "output_tokens": 1}', "number", id="no number"),
        pytest.param('{"id": 5, "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1}', "id must be a text", id="id"),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "prefix": [["h", 1]]}',
            "prefix must be a list",
            id="prefix",
        ),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "after": 7}', "list of ids", id="ids"
        ),
        pytest.param('{"id": "a", "arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "positive", id="empty"),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "x": 1}', "'x'", id="unknown"
        ),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "after": ["b"]}', "'b'", id="after"
        ),
        pytest.param(
            '{"id": "a", "arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "tool": {"n": 1}}', "tool", id="tool"
        ),
    ],
)
def test_a_bad_line_is_named_with_its_number(line, complaint, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"id": "ok", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}}\n\n{line}\n')
    with pytest.raises(trace_format.BadTrace, match=f"bad.jsonl:3: .*{complaint}"):
        trace_format.read(path)


def test_an_id_cannot_appear_twice(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a", "arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' * 2)
    with pytest.raises(trace_format.BadTrace, match=r"bad.jsonl:2: id 'a' appears twice"):
        trace_format.read(path)


def test_the_azure_trace_becomes_single_calls(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = trace_format.from_azure(path)
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579)
    assert second.output_tokens == 1


def test_a_file_that_is_not_the_azure_trace_is_a_sentence(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(trace_format.BadTrace, match="not a line of the Azure trace"):
        list(trace_format.from_azure(path))


def test_the_whole_azure_hour_is_read(published):
    calls = list(trace_format.from_azure(published("azure_llm_2023/AzureLLMInferenceTrace_conv.csv.gz")))
    assert len(calls) == 19_366
    assert len(calls) / calls[-1].arrival_s == pytest.approx(5.5, rel=0.05)


def test_a_workflow_is_a_chain_with_parallel_candidates_and_evaluations():
    calls = [call for call in made() if call.workflow == "t-0"]
    candidates = [call for call in calls if call.stage == text2sql_workflows.CANDIDATE]
    assert len({call.after for call in candidates}) == 1
    assert len(candidates) == 2
    after_candidates = calls[calls.index(candidates[-1]) + 1]
    assert set(after_candidates.after) == {call.id for call in candidates}
    assert [call.id for call in calls if not call.after] == ["t-0-0"]
    ids = [call.id for call in calls]
    assert all(ids.index(before) < ids.index(call.id) for call in calls for before in call.after)


def test_the_same_seed_makes_the_same_trace_and_another_another():
    assert made(seed=3) == made(seed=3)
    assert made(seed=3) != made(seed=4)


def test_the_generator_is_like_the_workflows_it_was_fitted_to(published):
    real = text2sql_workflows.imported(published("text2sql_workflows/workflows.jsonl.gz"), random.Random(0), rate=1.0)
    like = text2sql_workflows.trace(
        random.Random(0),
        [text2sql_workflows.FINANCIAL] * 57 + [text2sql_workflows.FORMULA1] * 15,
        workflows=2000,
        rate=1.0,
        name="t",
    )
    for stage in {call.stage for call in real}:
        ours, theirs = ([call for call in calls if call.stage == stage] for calls in (like, real))
        assert fmean(c.prompt_tokens for c in ours) == pytest.approx(fmean(c.prompt_tokens for c in theirs), rel=0.06)
        assert fmean(c.output_tokens for c in ours) == pytest.approx(fmean(c.output_tokens for c in theirs), rel=0.16)
    per_workflow = [
        sum(call.prompt_tokens for call in calls) / len({call.workflow for call in calls}) for calls in (like, real)
    ]
    assert per_workflow[0] == pytest.approx(per_workflow[1], rel=0.08)
