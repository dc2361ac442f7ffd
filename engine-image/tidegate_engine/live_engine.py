"""A real engine for tests: `tidegate engine` as a process, with a small model on the CPU.

Run one engine at a time: on a machine with two cores a second engine slows the first.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_engine import checkpoints

START_S, STOP_S = 280, 60
MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that is ready."""

    process: subprocess.Popen[bytes]
    http: str
    """Base URL of its OpenAI API."""
    control: str
    """host:port of its EngineControl."""
    log: Path

    def gauge(self, name: str) -> float:
        """A sample of its `/metrics`, summed over labels."""
        text = urllib.request.urlopen(f"{self.http}/metrics", timeout=10).read().decode()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))
        )


@contextlib.contextmanager
def served(log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Engine]:
    """`tidegate engine` with SmolLM2 and further `arguments`; the process has ended afterwards.

    Raises `AssertionError` with the end of the log if the engine does not become ready, and `checkpoints.MissingPackage` if
    there is no model."""
    http, control = free_port(), free_port()
    command = [sys.executable, "-m", "tidegate_engine.vllm_server", "--control", f"127.0.0.1:{control}"]
    command += ["--model", str(checkpoints.smollm2()), "--served-model-name", MODEL, "--port", str(http)]
    command += ["--max-model-len", "2048", "--enforce-eager", *arguments]
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # on a shared machine threads wait for each other; one thread is four times as fast as two
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **defaults, **(environment or {})},
            start_new_session=True,
        )
    engine = Engine(process=process, http=f"http://127.0.0.1:{http}", control=f"127.0.0.1:{control}", log=log)
    try:
        until(lambda: _healthy(engine), START_S, f"the engine did not become ready; its log is {log}")
        yield engine
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections, so it stays free until a process takes it."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(condition: Callable[[], bool], seconds: float, complaint: str) -> None:
    """Polls until `condition()` holds. Raises `AssertionError(complaint)` when `seconds` have passed."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(complaint)
        time.sleep(0.02)


def _healthy(engine: Engine) -> bool:
    if engine.process.poll() is not None:
        tail = "\n".join(engine.log.read_text(errors="replace").splitlines()[-30:])
        raise AssertionError(f"the engine left with {engine.process.returncode}:\n{tail}")
    try:
        return bool(urllib.request.urlopen(f"{engine.http}/health", timeout=5).status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
