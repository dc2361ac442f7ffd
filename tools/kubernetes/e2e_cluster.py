"""What the steps of `e2e` share: the cluster, the story that they tell, and questions to pools."""

import json
import pathlib
import secrets
import subprocess
import time
from collections.abc import Callable
from typing import Any

from localkube import node as localnode

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

    def __init__(
        self, programs_folder: pathlib.Path, kubeconfig: pathlib.Path, *, node: localnode.Node | None = None
    ) -> None:
        """`node` is the node that this run has made, None on a cluster that somebody gave it."""
        self._programs, self._kubeconfig = programs_folder, kubeconfig
        self._prefix = node.enter if node is not None else []
        self._node = node

    @property
    def is_ours(self) -> bool:
        """Whether this run has made the cluster, so that pods can mount programs of this machine."""
        return self._node is not None

    @property
    def node(self) -> localnode.Node:
        """The node that this run has made. Raises FailedError on a given cluster."""
        if self._node is None:
            raise FailedError("this check needs the node's own machine")
        return self._node

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run("kubectl", ["--kubeconfig", str(self._kubeconfig), *arguments], stdin)

    def helm(self, *arguments: str) -> str:
        return self._run("helm", ["--kubeconfig", str(self._kubeconfig), *arguments], None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """kubectl in the background."""
        command = [*self._prefix, str(self._programs / "kubectl"), "--kubeconfig", str(self._kubeconfig), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask_machine(self, *command: str) -> str:
        """What a program of this machine prints, run in the node's network."""
        return self._output([*self.node.enter, *command], " ".join(command), None)

    def _run(self, program: str, arguments: list[str], stdin: str | None) -> str:
        command = [*self._prefix, str(self._programs / program), *arguments]
        return self._output(command, f"{program} {' '.join(arguments[2:])}", stdin)

    def _output(self, command: list[str], shown: str, stdin: str | None) -> str:
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=False, timeout=600)
        if done.returncode:
            raise FailedError(f"{shown}\n{done.stdout}{done.stderr}")
        return done.stdout


class Load:
    """A steady load from the client's pod, in phases of which each ends when the test says so. It runs detached, because a
    connection of `kubectl exec` that stays open for minutes does not survive every stall of a busy machine."""

    def __init__(self, cluster: Cluster, url: str, slo_class: str, *phases: str, model: str = "demo") -> None:
        """A phase is RATE:WORDS:TOKENS: calls a second, words of a prompt, tokens of an answer."""
        self._cluster, self._pipe = cluster, f"/tmp/load-{secrets.token_hex(4)}"
        words = program("steady", url, model, slo_class, *phases)
        self._shell('mkfifo "$0" && { "$@" <> "$0" > "$0.json" 2>&1 & }', *words)

    def next_phase(self) -> None:
        """Ends the present phase; the calls that it has sent go on."""
        self._shell('echo > "$0"')

    def end(self) -> list[dict[str, Any]]:
        """Ends the last phase, waits for the calls that run, and returns what became of the calls of each phase."""
        self.next_phase()
        wait_for(lambda: bool(self._shell('cat "$0.json"')), timeout_s=180)
        told = self._shell('cat "$0.json"')
        try:
            return list(json.loads(told))
        except ValueError as error:
            raise FailedError(f"the load ended with: {told}") from error

    def _shell(self, script: str, *words: str) -> str:
        return self._cluster.kubectl("exec", "-n", WORK, "client", "--", "sh", "-c", script, self._pipe, *words)


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
