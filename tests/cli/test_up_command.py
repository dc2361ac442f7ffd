"""`tidegate up` gives a whole system, and takes all of it away again."""

import asyncio
import contextlib
import http.client
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import openai
import orjson
import pytest

from tidegate_cli import processes
from tidegate_control import control_client
from tidegate_sim import trace_format

READY_S = 60.0
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples" / "pool.yaml"


class Up:
    """A running `tidegate up`."""

    def __init__(self, state: pathlib.Path, *words: str) -> None:
        self.state = state
        self.port, self.grpc_port, self.admin_port = (processes.free_port() for _ in range(3))
        self.url = f"http://127.0.0.1:{self.port}"
        ports = [f"--port={self.port}", f"--grpc-port={self.grpc_port}", f"--admin-port={self.admin_port}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidegate_cli.main", "up", f"--state={state}", *ports, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, signum: int) -> tuple[int, str]:
        self.process.send_signal(signum)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def admin(self, path: str) -> dict[str, object]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10) as response:
            answer: dict[str, object] = orjson.loads(response.read())
            return answer

    def tidegate(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tidegate_cli.main", *words], capture_output=True, text=True, timeout=60
        )


def family_of(state: pathlib.Path) -> list[int]:
    """Processes that were started for the test with this state folder. (Valkey overwrites its environment, and works in
    the folder.)"""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                marked = f"TIDEGATE_TEST_FAMILY={state}".encode() in (entry / "environ").read_bytes()
                if (entry / "cmdline").read_bytes() and (marked or (entry / "cwd").readlink() == state):
                    found.append(int(entry.name))
    return found


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(state: pathlib.Path, *words: str) -> Iterator[Up]:
    """A system of two simulated engines; checks at the end that no process of it is left."""
    system = Up(state, "--engines=sim:a100,a6000", "--sim-speed=20", *words)
    line = system.first_line()
    assert line.startswith("tidegate is ready: http://127.0.0.1:"), system.end(signal.SIGKILL)
    yield system
    if system.process.poll() is None:
        system.end(signal.SIGINT)
    until(lambda: not family_of(state))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A system for tests that do not change it."""
    state = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_TEST_FAMILY", str(state))
        yield from started(state)


@pytest.fixture
def marked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("TIDEGATE_TEST_FAMILY", str(tmp_path))
    return tmp_path


@pytest.fixture
def up(marked: pathlib.Path) -> Iterator[Up]:
    """A system for tests that end it."""
    yield from started(marked)


def test_a_stock_openai_client_gets_whole_and_streamed_answers(shared: Up) -> None:
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12)  # type: ignore[arg-type]
    assert "simulated" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=12, stream=True))  # type: ignore[arg-type]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    response = client.responses.create(model=model, input="What is the capital of France?", max_output_tokens=12)
    assert response.output_text == said
    events = list(client.responses.create(model=model, input="What is it?", max_output_tokens=12, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    client.close()


def test_a_workflow_lives_from_its_first_call_to_its_end(shared: Up) -> None:
    def call(stage: str) -> None:
        headers = {
            "content-type": "application/json",
            "x-tidegate-workflow": "q-1",
            "x-tidegate-stage": stage,
            "x-tidegate-deadline-ms": "60000",
        }
        body = orjson.dumps({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        urllib.request.urlopen(
            urllib.request.Request(f"{shared.url}/v1/chat/completions", body, headers), timeout=30
        ).close()

    for stage in ("plan", "answer"):
        call(stage)
    end = urllib.request.Request(f"{shared.url}/v1/workflows/q-1/complete", b"{}", {"content-type": "application/json"})
    with urllib.request.urlopen(end, timeout=10) as response:
        workflow = orjson.loads(response.read())
    assert (workflow["state"], workflow["outcome"]) == ("done", "met")
    assert workflow["left_ms"] > 0
    assert [stage["name"] for stage in workflow["stages"]] == ["plan", "answer"]


def test_a_replay_completes_its_workflows(shared: Up, tmp_path: pathlib.Path) -> None:
    calls = [
        trace_format.TraceCall(
            id=f"{flow}-{stage}", arrival_s=0.0, prompt_tokens=20, output_tokens=4, workflow=flow, stage=stage,
            after=after and (f"{flow}-plan",), deadline_s=60.0,
        )
        for flow in ("one", "two")
        for stage, after in (("plan", ()), ("answer", ("plan",)))
    ]  # fmt: skip
    trace_format.write(tmp_path / "t.jsonl", calls)
    done = shared.tidegate("replay", str(tmp_path / "t.jsonl"), "--url", shared.url)
    assert "workflows 2   in time 2" in done.stdout
    assert "the gateway says 2 met" in done.stdout


@pytest.fixture
def configured(marked: pathlib.Path) -> Iterator[Up]:
    """A system with the settings of the worked example."""
    yield from started(marked, f"--config={EXAMPLE}")


def test_the_worked_example_runs_with_its_classes_limits_and_workflow_template(configured: Up) -> None:
    def call(**headers: str) -> http.client.HTTPMessage:
        body = orjson.dumps({"model": "sim", "prompt": "x", "max_tokens": 4})
        named = {"content-type": "application/json"} | {f"x-tidegate-{name}": text for name, text in headers.items()}
        request = urllib.request.Request(f"{configured.url}/v1/completions", body, named)
        with urllib.request.urlopen(request, timeout=30) as response:
            headers_of: http.client.HTTPMessage = response.headers
            return headers_of

    assert call(tenant="product", **{"class": "interactive"})["x-tidegate-engine"] in ("a100", "a6000")
    workflow = answer(f"{configured.url}/v1/workflows", {"id": "q-1", "template": "text2sql"})
    assert workflow["deadline_ms"] == 120_000
    assert [stage["name"] for stage in workflow["stages"]] == ["link", "candidates", "correct", "evaluate"]  # type: ignore[attr-defined]
    body = orjson.dumps({"model": "sim", "prompt": "word " * 15_000, "max_tokens": 1})
    named = {"content-type": "application/json", "x-tidegate-tenant": "evaluation"}

    def spend() -> None:
        for _ in range(4):
            urllib.request.urlopen(urllib.request.Request(f"{configured.url}/v1/completions", body, named)).close()

    with pytest.raises(urllib.error.HTTPError) as refused:
        spend()
    assert (refused.value.code, refused.value.headers["x-tidegate-reason"]) == (429, "tenant-limit")
    refused.value.close()
    assert "gateway.yaml" in " ".join(os.listdir(configured.state))
    written = configured.tidegate("config", "show", "--config", str(configured.state / "gateway.yaml")).stdout
    assert f"  port: {configured.port}" in written.splitlines()
    assert "  ttl: 30s" in written.splitlines()


def test_an_override_is_in_force_on_engines_and_gateway_until_it_ends(shared: Up) -> None:
    admin = f"--admin=http://127.0.0.1:{shared.admin_port}"
    done = shared.tidegate("policy", admin, "set", "edf", "--for", "10m")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["  a100: in force", "  a6000: in force"]
    assert "edf" in shared.tidegate("policy", admin, "get").stdout

    def in_force() -> bool:
        state = shared.admin("/admin/state")
        policies = {engine["policy"] for engine in state["engines"]} | {state["policy"]["name"]}  # type: ignore[attr-defined,index]
        return policies == {"edf"}

    until(in_force)
    assert shared.tidegate("policy", admin, "set", "auto").returncode == 0
    until(lambda: shared.admin("/admin/policy")["source"] == "steered")


def test_the_control_ports_require_the_token_of_the_run(shared: Up) -> None:
    controls = [engine["control"] for engine in shared.admin("/admin/state")["engines"]]  # type: ignore[attr-defined]
    assert len(controls) == 2

    async def answer(address: str) -> str:
        client = control_client.EngineClient(address)
        try:
            with pytest.raises(control_client.CallFailed) as failed:
                await client.set_policy("fcfs", "no token")
            return str(failed.value)
        finally:
            await client.close()

    for control in controls:
        assert asyncio.run(answer(control)).startswith("UNAUTHENTICATED")
    until(lambda: all(engine["policy"] for engine in shared.admin("/admin/state")["engines"]))  # type: ignore[attr-defined]


def test_ctrl_c_stops_every_process(up: Up) -> None:
    assert len(family_of(up.state)) >= 5
    code, _ = up.end(signal.SIGINT)
    assert code == 0
    assert not family_of(up.state)


def stream(up: Up, tokens: int) -> http.client.HTTPResponse:
    """A streamed answer whose first bytes have arrived."""
    body = orjson.dumps({"model": "sim", "prompt": "x", "max_tokens": tokens, "stream": True})
    request = urllib.request.Request(f"{up.url}/v1/completions", body, {"content-type": "application/json"})
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60)
    assert response.read(5) == b"data:"
    return response


def test_ctrl_c_lets_running_calls_finish(up: Up) -> None:
    answers = [stream(up, 1000) for _ in range(4)]
    up.process.send_signal(signal.SIGINT)
    assert all(answer.read().endswith(b"data: [DONE]\n\n") for answer in answers)
    _, errors = up.process.communicate(timeout=60)
    assert up.process.returncode == 0, errors
    assert "running calls may finish" in errors


def test_a_second_ctrl_c_kills_every_process_at_once(up: Up) -> None:
    with stream(up, 100_000):
        up.process.send_signal(signal.SIGINT)
        assert up.process.stderr is not None
        while "Ctrl-C again" not in up.process.stderr.readline():
            pass
        code, _ = up.end(signal.SIGINT)
    assert code == 130
    until(lambda: not family_of(up.state))


def test_sigkill_leaves_no_child_behind(up: Up) -> None:
    up.end(signal.SIGKILL)
    until(lambda: not family_of(up.state))


def test_a_second_up_on_the_same_state_folder_gives_one_sentence(shared: Up) -> None:
    second = Up(shared.state)
    _, errors = second.process.communicate(timeout=60)
    assert second.process.returncode == 1
    assert "another `tidegate up` uses" in errors


def engines_of(state: pathlib.Path) -> set[int]:
    found = set()
    for pid in family_of(state):
        with contextlib.suppress(OSError):  # a process may end meanwhile
            if b"sim-engine" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def test_a_crashed_engine_is_restarted_while_the_others_serve(up: Up) -> None:
    before = engines_of(up.state)
    os.kill(min(before), signal.SIGKILL)
    until(lambda: len(engines_of(up.state) - {min(before)}) == 2)
    _, errors = up.end(signal.SIGINT)
    assert "was killed by SIGKILL" in errors
    assert "is restarted" in errors


def answer(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=None if body is None else orjson.dumps(body), headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        found: dict[str, object] = orjson.loads(response.read())
        return found


def member(state: pathlib.Path, mark: bytes) -> int | None:
    """The process of the family whose command line has this mark."""
    for pid in family_of(state):
        with contextlib.suppress(OSError):
            if mark in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.parametrize(("name", "mark"), [("valkey", b"valkey.sock"), ("gateway", b"gateway.yaml")])
def test_a_crashed_store_or_gateway_is_restarted_and_workflows_survive(up: Up, name: str, mark: bytes) -> None:
    body = {"id": "kept", "deadline_ms": 600_000, "stages": [{"name": "a"}]}
    assert answer(f"{up.url}/v1/workflows", body)["state"] == "running"
    before = member(up.state, mark)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: member(up.state, mark) not in (None, before))

    def lives() -> bool:
        with contextlib.suppress(OSError):
            return bool(answer(f"{up.url}/v1/workflows/kept")["state"] == "running")
        return False

    until(lives, 180.0)
    _, errors = up.end(signal.SIGINT)
    assert f"{name} was killed by SIGKILL" in errors
    assert "is restarted" in errors


def test_a_process_that_crashes_too_often_ends_the_run_with_its_reason(up: Up) -> None:
    killed: list[int | None] = [None]
    while len(killed) <= 4:
        until(lambda: member(up.state, b"gateway.yaml") not in killed)
        if gateway := member(up.state, b"gateway.yaml"):
            os.kill(gateway, signal.SIGKILL)
            killed.append(gateway)
    _, errors = up.process.communicate(timeout=60)
    assert up.process.returncode == 1
    assert "gateway was killed by SIGKILL" in errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["--engines=gpu"], "is not one of sim:PROFILE", id="engines"),
        pytest.param(["--config=/nowhere"], "cannot read /nowhere", id="config"),
        pytest.param(["--policy=lifo"], "unknown policy 'lifo'", id="policy"),
        pytest.param(["--sim-speed=0"], "--sim-speed must be between", id="speed"),
        pytest.param(["--host=0.0.0.0"], "--host 0.0.0.0 lets other machines call", id="host"),
        pytest.param(["--model=/tmp"], "--model requires --engines vllm", id="model"),
        pytest.param(["--engines=vllm", "--model=/nowhere"], "/nowhere is not a model folder", id="no model"),
    ],
)
def test_a_wrong_command_line_gives_one_sentence_and_exit_code_2(
    marked: pathlib.Path, words: list[str], sentence: str
) -> None:
    system = Up(marked, *words)
    _, errors = system.process.communicate(timeout=60)
    assert system.process.returncode == 2
    assert sentence in errors
    assert "Traceback" not in errors


def test_a_port_in_use_gives_one_sentence_and_exit_code_1(marked: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        system = Up(marked, f"--port={taken.getsockname()[1]}")
        _, errors = system.process.communicate(timeout=60)
    assert system.process.returncode == 1
    assert "choose another by --port" in errors


def test_all_ports_in_use_are_named_at_once(shared: Up, marked: pathlib.Path) -> None:
    ports = [f"--port={shared.port}", f"--grpc-port={shared.grpc_port}", f"--admin-port={shared.admin_port}"]
    done = shared.tidegate("up", f"--state={marked}", *ports)
    assert done.returncode == 1
    for option in (*ports, "--state"):
        assert option.partition("=")[0] in done.stderr
    assert f"{shared.port} (--port), {shared.grpc_port} (--grpc-port) and {shared.admin_port}" in done.stderr


def test_a_store_that_does_not_answer_is_an_error_with_its_address(marked: pathlib.Path) -> None:
    path = marked / "settings.yaml"
    path.write_text("store: {url: 'redis://127.0.0.1:1/0', timeout: 1s}\n")
    system = Up(marked, f"--config={path}")
    _, errors = system.process.communicate(timeout=60)
    assert system.process.returncode == 1
    assert "the store at redis://127.0.0.1:1/0 does not answer" in errors
    assert "TIDEGATE_STORE_URL" in errors


def test_the_state_folder_may_be_a_relative_path(marked: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(marked.parent)
    for system in started(pathlib.Path(marked.name)):
        assert answer(f"{system.url}/v1/workflows")["object"] == "list"
    until(lambda: not family_of(marked))


def test_a_file_in_place_of_the_state_folder_gives_one_sentence(marked: pathlib.Path) -> None:
    path = marked / "state"
    path.write_text("")
    system = Up(path)
    _, errors = system.process.communicate(timeout=60)
    assert system.process.returncode == 1
    assert f"the state folder {path} cannot be used: it is a file; choose another by --state" in errors
