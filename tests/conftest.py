"""One `tidegate up` with simulated engines, for the tests of the client, the examples and the documents; the figures that
fault tests print; and property tests without a time limit for each example, because no outcome may depend on the speed of
the machine. They try the same examples in each run; `pytest --hypothesis-profile random tests/policy` tries others."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest

from tidegate_cli import processes

hypothesis.settings.register_profile("tidegate", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("tidegate")

FIGURES_FILE = "TIDEGATE_FAULTS"
"""`make faults` sets it to the file for the figures. Only then a figure that misses its goal fails the run."""
FIGURES: list[dict[str, str]] = []
ROOT = pathlib.Path(__file__).resolve().parents[1]
STOP_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Where a running `tidegate up` is."""

    url: str
    grpc: str
    admin_url: str


@contextlib.contextmanager
def up(state: pathlib.Path, *words: str) -> Iterator[System]:
    """A `tidegate up` with these options, on free ports."""
    http, grpc, admin = (processes.free_port() for _ in range(3))
    ports = [f"--port={http}", f"--grpc-port={grpc}", f"--admin-port={admin}"]
    command = [sys.executable, "-m", "tidegate_cli.main", "up", f"--state={state}", *ports, *words]
    with (state / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("tidegate is ready"), (state / "errors").read_text()
        yield System(url=f"http://127.0.0.1:{http}", grpc=f"127.0.0.1:{grpc}", admin_url=f"http://127.0.0.1:{admin}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=STOP_S)


@pytest.fixture(scope="session")
def running_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system with the tenants, classes and the template of the worked example. Tests share it."""
    example = ROOT / "docs" / "examples" / "pool.yaml"
    with up(
        tmp_path_factory.mktemp("up"), "--engines=sim:a100,a6000", "--sim-speed=20", f"--config={example}"
    ) as system:
        yield system


@pytest.fixture(scope="module")
def up_system(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[System]]:
    """`with up_system("--engines=...") as system` for tests that need a system of their own."""
    return lambda *words: up(tmp_path_factory.mktemp("own"), *words)


@pytest.fixture
def figure() -> Callable[..., None]:
    """Adds a line to the table at the end of the run: `figure("streams broken", "3", goal="0", met=False)`. `known` says
    why a goal is missed that may be missed, so that it does not fail `make faults`."""

    def add(name: str, value: str, *, goal: str, met: bool, known: str = "") -> None:
        verdict = "met" if met else f"missed: {known}" if known else "MISSED"
        FIGURES.append({"figure": name, "value": value, "goal": goal, "verdict": verdict})

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES:
        return
    terminalreporter.section("figures of the fault tests")
    width = max(len(row["figure"]) for row in FIGURES)
    for row in FIGURES:
        terminalreporter.line(f"{row['figure']:{width}}  {row['value']:>14}  goal {row['goal']:14}  {row['verdict']}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several processes that run tests has ended."""
    FIGURES.extend(getattr(node, "workeroutput", {}).get("figures", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = FIGURES  # for the process that prints the table
        return
    if FIGURES and (path := os.environ.get(FIGURES_FILE)):
        pathlib.Path(path).write_text(json.dumps(FIGURES, indent=1) + "\n")
        if session.exitstatus == 0 and any(row["verdict"] == "MISSED" for row in FIGURES):
            session.exitstatus = 1
