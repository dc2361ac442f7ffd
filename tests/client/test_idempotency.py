"""The SDK repeats a request of the client helper with the key of its first attempt."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai

import tidegate_client

WORKFLOW = {
    "id": "w", "state": "running", "outcome": None, "deadline": "2026-01-01T00:00:00Z", "ended_at": None,
    "deadline_ms": 1000, "left_ms": 1000, "stages": [],
}  # fmt: skip
ANSWER = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": []}


class Flaky(http.server.BaseHTTPRequestHandler):
    """Answers each path with 503 first."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        seen: list[tuple[str, dict[str, str]]] = self.server.seen  # type: ignore[attr-defined]
        seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        failing = [path for path, _ in seen].count(self.path) == 1
        body = json.dumps(ANSWER if self.path.endswith("completions") else WORKFLOW).encode()
        self.send_response(503 if failing else 200)
        self.send_header("content-type", "application/json")
        self.send_header("retry-after-ms", "1")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def flaky() -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", server.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_retry_has_the_key_and_the_headers_of_the_first_attempt() -> None:
    with (
        flaky() as (url, seen),
        openai.OpenAI(base_url=url, api_key="none") as client,
        tidegate_client.Workflow(client, deadline_s=1, tenant="t", slo_class="c", session="s") as flow,
    ):
        asked = flow.stage("plan", urgency=1, deadline_s=0.5)
        asked.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    assert [path for path, _ in seen[::2]] == ["/v1/workflows", "/v1/chat/completions", "/v1/workflows/w/complete"]
    for (path, first), (again, second) in zip(seen[::2], seen[1::2], strict=True):
        assert path == again
        assert first["idempotency-key"] == second["idempotency-key"]
    assert len({sent["idempotency-key"] for _, sent in seen}) == 3
    call = seen[2][1]
    assert {name: value for name, value in call.items() if name.startswith(("x-tidegate", "x-session"))} == {
        "x-tidegate-tenant": "t", "x-tidegate-class": "c", "x-session-id": "s", "x-tidegate-workflow": "w",
        "x-tidegate-stage": "plan", "x-tidegate-urgency": "1", "x-tidegate-deadline-ms": "500",
    }  # fmt: skip


def test_a_client_that_is_not_of_a_workflow_keeps_its_headers_and_sends_no_key() -> None:
    with flaky() as (url, seen), openai.OpenAI(base_url=url, api_key="none", max_retries=1) as client:
        tidegate_client.Workflow(client, deadline_s=1, tenant="t")
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    assert not [name for _, sent in seen for name in sent if name.startswith("x-tidegate") or "idempotency" in name]
