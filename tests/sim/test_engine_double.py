"""`tidegate sim-engine` as a process: its ports, and how it ends."""

import contextlib
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tidegate_cli import processes

PROGRAM = "import sys; from tidegate_sim import engine_double; sys.exit(engine_double.main(sys.argv[1:]))"
STEPS = 40
"""Tokens of the call under way; at a fifth of the profile's pace they take some seconds."""

Start = Callable[..., tuple[subprocess.Popen[bytes], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an engine with more arguments; gives the process and its URL once it answers."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> tuple[subprocess.Popen[bytes], str]:
        port = processes.free_port()
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            f"--port={port}",
            f"--control=127.0.0.1:{processes.free_port()}",
            "--speed=0.2",
        ]
        started.append(subprocess.Popen([*command, *arguments]))
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url))
        return started[-1], url

    yield begin
    for process in started:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def streaming(url: str) -> Iterator[bytes]:
    """The lines of a call of `STEPS` tokens, as they come."""
    body = json.dumps({"model": "sim", "prompt": "x", "max_tokens": STEPS, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        yield from (line.strip() for line in response if line.strip())


def test_a_call_under_way_is_finished_after_sigterm_and_no_new_one_is_taken(start: Start) -> None:
    process, url = start("--shutdown-timeout=60")
    lines = streaming(url)
    next(lines)
    process.send_signal(signal.SIGTERM)
    until(lambda: not answers(url))
    *events, done = lines
    assert done == b"data: [DONE]"
    assert json.loads(events[-1].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) == 0


def test_a_profile_of_a_file_is_named_by_the_file(start: Start, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "h100-8b.yaml"
    path.write_text("cost: {step_s: 0.01, prefill_s: 0.0001}\n")
    _, url = start(f"--profile={path}")
    with urllib.request.urlopen(f"{url}/version", timeout=5) as response:
        assert json.load(response)["simulated"] == "h100-8b"


def test_a_call_that_takes_too_long_is_cut(start: Start) -> None:
    process, url = start("--shutdown-timeout=0.2")
    lines = streaming(url)
    next(lines)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    with contextlib.suppress(http.client.HTTPException, OSError):
        assert b"data: [DONE]" not in [*lines]


def test_two_engines_without_a_control_address_both_serve() -> None:
    command = [sys.executable, "-c", PROGRAM, "--port=0"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        lines = [
            next(line for line in process.stderr if line.startswith("simulated engine"))
            for process in processes
            if process.stderr is not None
        ]
        urls = [re.findall(r"http://[0-9.:]+", line)[0] for line in lines]
        assert all(answers(url) for url in urls)
        assert len({line.rsplit(" ", 1)[-1] for line in lines}) == 2
    finally:
        for process in processes:
            process.terminate()
            process.communicate(timeout=60)


def test_a_free_control_port_is_shown_and_answers() -> None:
    command = [sys.executable, "-c", PROGRAM, "--port=0", "--control=127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next(line for line in process.stderr if line.startswith("simulated engine")).split()[-1]
        host, port = address.split(":")
        assert int(port) > 0
        socket.create_connection((host, int(port)), timeout=10).close()
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:99999", "the address must be HOST:PORT with a port from 0 to 65535"),
        ("127.0.0.1:-5", "the address must be HOST:PORT with a port from 0 to 65535"),
        ("127.0.0.1:abc", "the address must be HOST:PORT with a port from 0 to 65535"),
        ("localhost", "the address must be HOST:PORT with a port from 0 to 65535"),
        (":9010", "the address must be HOST:PORT with a port from 0 to 65535"),
        ("192.0.2.1:9010", "Cannot assign requested address"),
    ],
)
def test_a_control_address_that_cannot_be_used_is_one_sentence(address: str, problem: str) -> None:
    command = [sys.executable, "-c", PROGRAM, "--port=0", f"--control={address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        1,
        f"tidegate sim-engine: EngineControl cannot listen on {address!r}: {problem}\n",
    )


def test_a_control_address_that_is_given_and_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-c", PROGRAM, "--port=0", f"--control=127.0.0.1:{taken.getsockname()[1]}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith(": Address already in use\n")
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", PROGRAM, f"--port={port}", "--control=127.0.0.1:0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tidegate sim-engine: port {port} on 127.0.0.1 is in use; choose another by --port")


def test_a_short_name_of_a_profile_is_known_and_an_unknown_one_is_a_wrong_command_line(start: Start) -> None:
    start("--profile=a6000")
    for words in (["--profile=a7000"], ["--regulators=none"]):
        command = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert f"tidegate sim-engine: {words[0].partition('=')[0]}: unknown" in done.stderr
