"""What the steps of `e2e` share: the cluster, the story that they tell, and questions to pools."""

import json
import pathlib
import secrets
import subprocess
import time
from collections.abc import Callable
from typing import Any

E2E = pathlib.Path(__file__).resolve().parents[2] / "tests" / "e2e"
RUN = secrets.token_hex(4)
SYSTEM, WORK = f"tidegate-e2e-system-{RUN}", f"tidegate-e2e-{RUN}"
MADE_HERE = f"tidegate.dev/e2e={RUN}"
"""Label of the namespaces that this run has made."""
GATEWAY = f"http://chat-gateway.{WORK}.svc:8000"
REAL_GATEWAY = f"http://real-gateway.{WORK}.svc:8000"
LOCAL_ENGINE = "localhost/tidegate-engine:e2e"
LOCAL_IMAGES = ("localhost/tidegate:e2e", "localhost/tidegate-operator:e2e")


class FailedError(Exception):
    """A check did not hold; the message says what was seen instead."""


class Story:
    """The checks, told as they happen. After one that fails, the rest cannot be trusted and is not run."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, 0

    def check(self, title: str, run: Callable[[], str | None]) -> None:
        if self.failed:
            self.failed += 1
            print(f"  not run  {title}", flush=True)
            return
        started = time.monotonic()
        try:
            detail = run()
        except Exception as error:  # noqa: BLE001  # every failure is told, and the node is taken down afterwards
            self.failed += 1
            print(f"  FAILED   {title} ({time.monotonic() - started:.1f} s)\n{indent(str(error))}", flush=True)
        else:
            self.passed += 1
            print(f"  passed   {title} ({time.monotonic() - started:.1f} s)", flush=True)
            if detail:
                print(indent(detail), flush=True)


class Cluster:
    """A cluster to test on: its programs, and how to call them."""

    def __init__(self, programs_folder: pathlib.Path, prefix: list[str], kubeconfig: pathlib.Path) -> None:
        self._programs, self._prefix, self._kubeconfig = programs_folder, prefix, kubeconfig

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run("kubectl", ["--kubeconfig", str(self._kubeconfig), *arguments], stdin)

    def helm(self, *arguments: str) -> str:
        return self._run("helm", ["--kubeconfig", str(self._kubeconfig), *arguments], None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """kubectl in the background."""
        command = [*self._prefix, str(self._programs / "kubectl"), "--kubeconfig", str(self._kubeconfig), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _run(self, program: str, arguments: list[str], stdin: str | None) -> str:
        command = [*self._prefix, str(self._programs / program), *arguments]
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=False, timeout=600)
        if done.returncode:
            raise FailedError(f"{program} {' '.join(arguments[2:])}\n{done.stdout}{done.stderr}")
        return done.stdout


def engine_states(cluster: Cluster, pool: str) -> dict[str, Any]:
    """GetState of each engine. Asked from a gateway's pod, which the NetworkPolicy lets in."""
    path = "{range .items[*]}{.status.podIP}:9001 {end}"
    selector = f"tidegate.dev/pool={pool},app.kubernetes.io/component=engine"
    addresses = cluster.kubectl("get", "pods", "-n", WORK, "-l", selector, "-o", f"jsonpath={path}").split()
    output = cluster.kubectl("exec", "-n", WORK, f"deploy/{pool}-gateway", "--", *program("states", *addresses))
    return dict(json.loads(output))


def policies(cluster: Cluster, pool: str) -> set[str]:
    return {state["policy"] for state in engine_states(cluster, pool).values()}


def active_policy(cluster: Cluster, pool: str) -> str:
    return cluster.kubectl("get", "-n", WORK, f"spool/{pool}", "-o", "jsonpath={.status.activePolicy.name}")


def ask(cluster: Cluster, *words: str) -> dict[str, Any]:
    return dict(json.loads(cluster.kubectl("exec", "-n", WORK, "client", "--", *program(*words))))


def program(*words: str) -> list[str]:
    return ["python", "-c", (E2E / "client.py").read_text(), *words]


def wait_for(true: Callable[[], bool], *, timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not (result := true()) and time.monotonic() < until:
        time.sleep(0.5)
    return result


def expect(holds: bool, seen: object) -> None:
    if not holds:
        raise FailedError(f"seen: {seen}")


def indent(text: str) -> str:
    return "\n".join(f"           {line}" for line in text.rstrip().splitlines())
