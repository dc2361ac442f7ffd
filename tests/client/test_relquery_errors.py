"""A relQuery of the client helper says when rows have no result, waits for a gateway that restarts, and names an id that is
taken."""

import contextlib
import http.server
import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

import tidegate_client
from tidegate_client import relquery_errors

ROWS = [{"country": name} for name in ("Peru", "Chad", "Laos")]
ASKED: dict[str, Any] = {"model": "sim", "template": "Name the capital of {{country}}.", "rows": ROWS}


def page(*rows: int, last: int, status: str) -> tuple[int, dict[str, Any]]:
    data = [{"row": row, "text": "a", "finish_reason": "stop"} for row in rows]
    more = status == "in_progress"
    return 200, {"data": data, "last": last, "has_more": more, "relquery": {"id": "q", "status": status}}


AWAY = 503, {"error": {"message": "the gateway stops"}}


class Scripted(http.server.BaseHTTPRequestHandler):
    """Accepts every relQuery, and answers the looks at its rows in order; the last answer stays."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.answer(201, {"id": "q", "status": "in_progress"})

    def do_GET(self) -> None:
        answers: list[tuple[int, dict[str, Any]]] = self.server.answers  # type: ignore[attr-defined]
        self.answer(*(answers.pop(0) if len(answers) > 1 else answers[0]))

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def scripted(answers: Sequence[tuple[int, dict[str, Any]]]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.answers = list(answers)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "reason"), [("expired", "deadline"), ("cancelled", "cancelled it")])
async def test_rows_without_a_result_are_an_error_after_the_results_that_came(status: str, reason: str) -> None:
    answers = [page(1, last=1, status="in_progress"), page(last=1, status=status)]
    seen: list[int] = []
    with (
        scripted(answers) as url,
        openai.OpenAI(base_url=url, api_key="none") as client,
        pytest.raises(tidegate_client.RelQueryIncomplete, match=reason) as raised,
    ):
        seen.extend(result.row for result in tidegate_client.relquery(client, id="q", **ASKED))
    assert seen == [1]
    assert "relQuery 'q'" in str(raised.value)
    assert "2 rows have no result, of 3" in str(raised.value)
    assert (raised.value.id, raised.value.status, raised.value.missing) == ("q", status, 2)
    with scripted(answers) as url:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as following:
            with pytest.raises(tidegate_client.RelQueryIncomplete):
                assert [result.row async for result in tidegate_client.async_relquery(following, id="q", **ASKED)]


async def test_a_gateway_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relquery_errors, "FIRST_PAUSE_S", 0.01)
    answers = [page(1, last=1, status="in_progress"), AWAY, AWAY, AWAY, page(0, 2, last=3, status="completed")]
    with scripted(answers) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [result.row for result in tidegate_client.relquery(client, id="q", **ASKED)] == [1, 0, 2]
    with scripted(answers) as url:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as following:
            results = tidegate_client.async_relquery(following, id="q", **ASKED)
            assert [result.row async for result in results] == [1, 0, 2]


def test_a_gateway_that_stays_away_is_an_error_with_its_address_and_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relquery_errors, "RESUME_S", 0.2)
    monkeypatch.setattr(relquery_errors, "FIRST_PAUSE_S", 0.05)
    with openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0) as client:
        with scripted([page(1, last=1, status="in_progress")]) as url:
            results = tidegate_client.relquery(client.with_options(base_url=url), id="q", **ASKED)
            assert next(results).row == 1
        with pytest.raises(openai.APIConnectionError, match=f"gateway at {url}/ cannot be reached: .*id='q' again"):
            next(results)
        with pytest.raises(openai.APIConnectionError, match=r"http://127.0.0.1:1/v1/ cannot be reached"):
            next(tidegate_client.relquery(client, id="q", **ASKED))


def test_an_id_of_another_question_is_an_error_about_the_id(running_up: Any) -> None:
    name = f"capitals-{secrets.token_hex(4)}"
    with openai.OpenAI(base_url=f"{running_up.url}/v1", api_key="none") as client:
        assert len(list(tidegate_client.relquery(client, id=name, max_tokens=4, **ASKED))) == 3
        with pytest.raises(openai.UnprocessableEntityError, match=f"the id '{name}' belongs to") as raised:
            next(tidegate_client.relquery(client, id=name, max_tokens=5, **ASKED))
    assert "Idempotency" not in str(raised.value)
