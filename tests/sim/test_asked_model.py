"""The selector `llm` in virtual time asks a model over real sockets, where the environment names one."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson
import pytest

from tidegate_sim import asked_model, suite
from tidegate_sim.suites import maas

ASKED: list[dict[str, object]] = []


class Model(BaseHTTPRequestHandler):
    """Chooses `sjf` whatever it is asked."""

    def do_POST(self) -> None:
        ASKED.append(orjson.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = orjson.dumps({"choices": [{"message": {"content": '{"policy": "sjf"}'}}]})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ASKED.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(asked_model.URL, f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv(asked_model.NAME, "tiny")
    yield
    server.shutdown()
    server.server_close()


def key() -> suite.CellKey:
    return suite.CellKey(
        suite="maas",
        pool=maas.POOL,
        row="selector llm",
        trace="stress/1401",
        rate=maas.RATE,
        workflows=400,
        scheduler="fast",
    )


def test_the_model_chooses_the_policy(model: None) -> None:
    found = suite.run_cell(key())
    assert found["switches"]
    assert found["switches"][0].endswith("s sjf: llm: the model chose it")
    assert {request["model"] for request in ASKED} == {"tiny"}


def test_without_a_model_there_is_no_such_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(asked_model.URL, raising=False)
    assert "selector llm" not in maas.SUITE.everywhere
