"""Replay makes every call at its instant and reports what the clients saw."""

import http.server
import json
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tidegate_cli import openloop, processes, replay_command
from tidegate_sim import trace_format

SECONDS = 60


@pytest.fixture(scope="module")
def engine(sim_engine: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """A simulated engine: replay works with every server of OpenAI's API."""
    with sim_engine("--speed", "50") as url:
        yield url


def tidegate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(processes.ourselves(*words), capture_output=True, text=True, timeout=SECONDS)


def trace(path: pathlib.Path, *calls: trace_format.TraceCall) -> str:
    trace_format.write(path, calls)
    return str(path)


def test_the_calls_of_a_workflow_follow_each_other_and_are_reported_as_one_workflow(
    engine: str, tmp_path: pathlib.Path
) -> None:
    def call(name: str, *after: str) -> trace_format.TraceCall:
        return trace_format.TraceCall(
            id=name, arrival_s=0.05, prompt_tokens=20, output_tokens=8, workflow="w", after=after, deadline_s=30.0
        )

    path = trace(tmp_path / "t.jsonl", call("a"), call("b", "a"), call("c", "a"), call("d", "b", "c"))
    out = tmp_path / "report.json"
    done = tidegate("replay", path, "--url", engine, "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["calls"], report["errors"], report["output_tokens"]) == (4, 0, 32)
    assert report["workflows"]["count"] == report["workflows"]["in_time"] == 1
    assert report["workflows"]["latency_s"]["mean"] >= report["e2e_s"]["mean"]
    assert "calls 4   errors 0" in done.stdout


def test_a_failed_call_is_counted_with_its_message(engine: str, tmp_path: pathlib.Path) -> None:
    path = trace(tmp_path / "t.jsonl", trace_format.TraceCall(id="a", arrival_s=0, prompt_tokens=5, output_tokens=5))
    done = tidegate("replay", path, "--url", engine, "--model", "nobody", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["errors"] == 1
    assert list(report["error_sentences"]) == ["400 this engine serves 'sim', not 'nobody'"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("", "holds no calls", id="empty"),
        pytest.param("{", "not JSON", id="not json"),
        pytest.param('{"id": "a"}', "arrival_s is required", id="incomplete"),
    ],
)
def test_an_unreadable_trace_gives_one_sentence(tmp_path: pathlib.Path, text: str, sentence: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    done = tidegate("replay", str(path))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_gateway_gives_one_sentence(tmp_path: pathlib.Path) -> None:
    path = trace(tmp_path / "t.jsonl", trace_format.TraceCall(id="a", arrival_s=0, prompt_tokens=5, output_tokens=5))
    done = tidegate("replay", path, "--url", f"http://127.0.0.1:{processes.free_port()}")
    assert done.returncode == 1
    assert "no gateway answers at" in done.stderr


def test_a_gateway_that_wants_a_key_says_so_and_gets_the_one_of_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Guarded(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("authorization"))
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "this gateway needs an API key"}}')

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    seen: list[str | None] = []
    path = trace(tmp_path / "t.jsonl", trace_format.TraceCall(id="a", arrival_s=0, prompt_tokens=5, output_tokens=5))
    monkeypatch.setenv("TIDEGATE_API_KEY", "a-key")
    with http.server.HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = tidegate("replay", path, "--url", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert done.returncode == 1
    assert "answers 401 this gateway needs an API key; set TIDEGATE_API_KEY" in done.stderr
    assert seen == ["Bearer a-key"]


def test_percentiles_are_measured_values() -> None:
    assert replay_command.distribution([None, 3.0, 1.0, 2.0]) == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": 3.0,
        "p95": 3.0,
        "p99": 3.0,
    }
    assert replay_command.distribution([None]) is None


def test_a_missed_target_counts_as_missed_and_calls_without_targets_do_not_count() -> None:
    def call(name: str, ttft_ms: float | None) -> trace_format.TraceCall:
        return trace_format.TraceCall(id=name, arrival_s=0, prompt_tokens=1, output_tokens=1, ttft_slo_ms=ttft_ms)

    def seen(name: str) -> openloop.Outcome:
        return openloop.Outcome(id=name, sent_at_s=0.0, first_at_s=0.5, last_at_s=0.6, tokens=2)

    calls = [call("met", 600), call("missed", 400), call("free", None)]
    report = replay_command.summary(
        calls, openloop.Result(calls=[seen(each.id) for each in calls], workflows={}), settings={}
    )
    assert (report["with_slo"], report["slo_attainment"]) == (2, 0.5)


def test_prompts_have_as_many_words_as_tokens_and_differ_by_seed() -> None:
    assert len(openloop.prompt(100, 1).split()) == 100
    assert openloop.prompt(100, 1) == openloop.prompt(100, 1) != openloop.prompt(100, 2)


@pytest.mark.parametrize("limit", ["60", "0s"])
def test_a_time_limit_without_a_unit_or_a_length_is_a_usage_error(limit: str) -> None:
    done = tidegate("replay", "trace.jsonl", "--timeout", limit)
    assert done.returncode == 2
    assert ("60 has no unit; write 60ms or 60s" if limit == "60" else "must be more than 0") in done.stderr
