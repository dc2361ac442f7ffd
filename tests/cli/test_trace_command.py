"""`tidegate trace import` makes a trace of each public format."""

import gzip
import json
import pathlib
from collections import Counter

import pytest

from tidegate_cli import main
from tidegate_sim import trace_format

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9051690,396,0\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [7]}\n'
)
AUGMENTED = (
    "request_id,tool,segment,prompt_tokens,completion_tokens,api_time_s,api_return_tokens\n"
    "a,qa,0,100,10,0.5,20\na,qa,1,130,12,,\nb,math,0,50,5,,\n"
)
RELATIONAL = "".join(
    json.dumps(
        {
            "dataset": "shop",
            "template": template,
            "prompt": f"{template}: row {number}",
            "prompt_tokens": 10 + number,
            "output_tokens": 1 + number,
        }
    )
    + "\n"
    for template in ("is it good", "sum it up")
    for number in range(4)
)
STEPS = [("link", 300, 5), ("generate_candidate_x", 900, 90), ("evaluate", 80, 8), ("evaluate", 81, 9), ("end", 40, 4)]
TEXT2SQL = json.dumps(
    {"id": 1, "steps": [{"step": name, "input_length": given, "output_length": out} for name, given, out in STEPS]}
)


def imported(tmp_path: pathlib.Path, name: str, source: pathlib.Path, *words: str) -> list[trace_format.TraceCall]:
    out = tmp_path / "trace.jsonl"
    assert main.main(["trace", "import", name, str(source), "--out", str(out), *words]) == 0
    return trace_format.read(out)


def file(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "data.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_azure_calls_have_instants_since_the_first_call(tmp_path: pathlib.Path) -> None:
    first, second = imported(tmp_path, "azure", file(tmp_path, AZURE))
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 374, 44)
    assert (round(second.arrival_s, 3), second.output_tokens) == (4.225, 1)


def test_mooncake_calls_have_the_blocks_of_their_prompts(tmp_path: pathlib.Path) -> None:
    first, second = imported(tmp_path, "mooncake", file(tmp_path, MOONCAKE))
    assert first.prefix == ((7, 512), (8, 88))
    assert (second.arrival_s, second.prefix) == (1.5, ((7, 512),))


def test_sessions_with_tools_have_their_turns_one_after_the_other(tmp_path: pathlib.Path) -> None:
    calls = imported(tmp_path, "augmented", file(tmp_path, AUGMENTED), "--rate", "2", "--seed", "3")
    assert [(call.session, len(call.after), call.tool is not None) for call in calls] == [
        ("s0", 0, True), ("s0", 1, False), ("s1", 0, False),
    ]  # fmt: skip
    assert calls[2].arrival_s > calls[0].arrival_s > 0


def test_relational_queries_have_rows_of_one_template(tmp_path: pathlib.Path) -> None:
    calls = imported(tmp_path, "relational", file(tmp_path, RELATIONAL), "--queries", "30", "--rate", "2")
    queries = {call.relquery: {other.slo_class for other in calls if other.relquery == call.relquery} for call in calls}
    assert len(queries) == 30
    assert {name for names in queries.values() for name in names} == {"shop is it good", "shop sum it up"}
    assert all(len(names) == 1 for names in queries.values())
    assert {call.prompt_tokens for call in calls} == {10, 11, 12, 13}
    assert all(call.output_tokens == call.prompt_tokens - 9 for call in calls)


def test_workflows_have_their_stages_and_parallel_calls(tmp_path: pathlib.Path) -> None:
    calls = imported(tmp_path, "text2sql", file(tmp_path, TEXT2SQL))
    assert [call.stage for call in calls] == [name for name, _, _ in STEPS]
    assert calls[2].after == calls[3].after == (calls[1].id,)
    assert set(calls[4].after) == {calls[2].id, calls[3].id}


@pytest.fixture
def servegen(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "servegen"
    folder.mkdir()
    lengths = {"0": {"input_tokens": "{}", "output_tokens": "{}"}, "21600": {"input_tokens": "{100: 1.0}", "output_tokens": "{7: 0.5, 9: 0.5}"}}  # fmt: skip # noqa: E501
    for client, family in (("chunk-0", "Gamma"), ("chunk-1", "Weibull"), ("chunk-2", "Gamma")):
        windows = [f"0,0.5,1.0,{family},1.0,2.0", "600,0,0,,0,0", f"1200,1.0,1.0,{family},0.8,1.0"]
        (folder / f"{client}-trace.csv").write_text("\n".join(windows) + "\n")
        if client != "chunk-2":
            (folder / f"{client}-dataset.json").write_text(json.dumps(lengths))
    return folder


def test_servegen_windows_have_their_number_of_calls(tmp_path: pathlib.Path, servegen: pathlib.Path) -> None:
    calls = imported(tmp_path, "servegen", servegen, "--span", "30m", "--scale", "0.5")
    assert Counter(call.tenant for call in calls) == {"chunk-0": 450, "chunk-1": 450}
    assert not [call for call in calls if 600 <= call.arrival_s < 1200]
    assert {call.prompt_tokens for call in calls} == {100}
    assert {call.output_tokens for call in calls} == {7, 9}
    assert [call.arrival_s for call in calls] == sorted(call.arrival_s for call in calls)
    again = imported(tmp_path, "servegen", servegen, "--span", "30m", "--scale", "0.5")
    assert again == calls


def test_servegen_can_begin_later(tmp_path: pathlib.Path, servegen: pathlib.Path) -> None:
    calls = imported(tmp_path, "servegen", servegen, "--start", "20m", "--span", "1m")
    assert 60 < len(calls) < 180
    assert 0 <= calls[0].arrival_s < calls[-1].arrival_s < 60


def test_without_out_the_trace_goes_to_the_output(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trace", "import", "azure", str(file(tmp_path, AZURE)), "--limit", "1"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1
    assert json.loads(shown.out)["prompt_tokens"] == 374
    assert shown.err == "1 calls of 0 s, mean prompt 374 and output 44 tokens\n"


@pytest.mark.parametrize("name", ["azure", "mooncake", "servegen", "augmented", "relational", "text2sql"])
def test_what_is_not_of_the_format_gives_one_sentence(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b\n1,2\n")
    for source in (wrong, tmp_path / "absent"):
        assert main.main(["trace", "import", name, str(source)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("tidegate trace: ")
        assert str(source) in error
        assert len(error.splitlines()) == 1
