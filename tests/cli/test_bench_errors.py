"""`tidegate bench` names a file that it cannot read before it works."""

import json
import pathlib

import pytest

from tidegate_sim import bench


def test_a_trace_file_that_does_not_exist_gives_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["prefix", "--checked-share", "0", "--trace-file", "/nosuch", "--workflows", "1"]) == 1
    assert "tidegate bench: cannot use /nosuch: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "prompt", "says"),
    [
        ("hetero-1", 200_000, "does not fit into the context of 65536 tokens"),
        ("a100-40-opt-13b", 20_000, "does not fit into the KV memory of an engine of a100-40-opt-13b"),
    ],
)
def test_a_call_that_no_engine_can_serve_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], pool: str, prompt: int, says: str
) -> None:
    trace = tmp_path / "calls.jsonl"
    trace.write_text(json.dumps({"id": "big", "arrival_s": 0, "prompt_tokens": prompt, "output_tokens": 5}) + "\n")
    assert bench.main(["--trace", str(trace), "--pool", pool, "--policy", "fcfs"]) == 1
    told = capsys.readouterr().err
    assert f"the call big with a prompt of {prompt} tokens" in told
    assert says in told
