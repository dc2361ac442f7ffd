"""SIGTERM drains. The last file of its folder, since it stops the engine that the session shares."""

import json
import signal
import urllib.request

import pytest

pytest.importorskip("vllm", reason="needs the vLLM CPU build")

from tidegate_engine import live_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24


def test_a_call_that_runs_when_sigterm_comes_is_answered_in_full(engine):
    body = {"model": live_engine.MODEL, "prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    call = urllib.request.Request(
        f"{engine.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        first = answer.readline()
        engine.process.send_signal(signal.SIGTERM)
        lines = [first, *answer]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
    assert lines[-2].startswith(b"data: [DONE]")
    assert engine.process.wait(60) == 0
