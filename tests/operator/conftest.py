"""A real control plane for the whole session (see `localkube.control_plane`), and a namespace for each test."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
import yaml
from kubernetes.aio import client, config

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "kubernetes"))

from localkube import background_processes, control_plane, programs  # noqa: E402

from tidegate_operator import reconcile, render, spec_problems  # noqa: E402
from tidegate_operator.cluster import api_server  # noqa: E402

Kubectl = Callable[..., str]

CRD = ROOT / "crds" / "servingpools.tidegate.dev.yaml"
CHART = ROOT / "helm" / "tidegate"
NODES = (("a100-0", "NVIDIA-A100-SXM4-80GB"), ("a100-1", "NVIDIA-A100-SXM4-80GB"), ("a6000-0", "NVIDIA-RTX-A6000"))

_numbers = itertools.count(1)
_FAILED = pytest.StashKey[bool]()


@contextlib.contextmanager
def control_plane_with_gpus(folder: pathlib.Path) -> Iterator[control_plane.ControlPlane]:
    """An API server with ServingPools, controllers, a scheduler, and three simulated nodes with eight GPUs each."""
    started = control_plane.start(programs.for_tests(), folder)
    try:
        nodes = [control_plane.fake_gpu_node(name, product=product) for name, product in NODES]
        started.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, nodes)))
        started.add_kinds(CRD, "tidegate.dev/v1alpha1")
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control_plane.ControlPlane]:
    with control_plane_with_gpus(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keeps whether the test or its setup failed, for its fixtures."""
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.fixture
def namespace(plane: control_plane.ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, which rejects pods that are not `restricted`. Its pods give up their GPUs afterwards,
    so that the order of the tests does not matter. What it contained when a test failed is printed."""
    name = make_namespace(plane, f"test-{next(_numbers)}")
    yield name
    if request.node.stash.get(_FAILED, False):
        print(plane.kubectl("-n", name, "get", "deployments,statefulsets,replicasets,pods,events", check=False))
        print(plane.kubectl("-n", name, "get", "spool", "-o", "jsonpath={.items[*].status}", check=False))
        print(f"ended: {plane.processes.ended() or 'no process of the control plane'}")
    plane.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


def make_namespace(plane: control_plane.ControlPlane, name: str) -> str:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    plane.kubectl("create", "-f", "-", stdin=json.dumps(body))
    return name


@pytest.fixture
def kubectl(plane: control_plane.ControlPlane, namespace: str) -> Kubectl:
    """kubectl in the test's namespace."""

    def run(*arguments: str, body: dict[str, Any] | None = None, check: bool = True) -> str:
        stdin = None if body is None else json.dumps(body)
        return plane.kubectl("-n", namespace, *arguments, stdin=stdin, check=check)

    return run


@pytest.fixture
async def cluster(plane: control_plane.ControlPlane) -> AsyncIterator[api_server.ApiServer]:
    """The API server with the rights of an administrator."""
    async with connected(plane.kubeconfig) as server:
        yield server


@pytest.fixture
async def gateway_cluster(plane: control_plane.ControlPlane) -> AsyncIterator[api_server.ApiServer]:
    """As `cluster`, where pools may have a Gateway of the cluster."""
    async with connected(plane.kubeconfig, gateway_api=True) as server:
        yield server


@contextlib.asynccontextmanager
async def connected(kubeconfig: pathlib.Path, *, gateway_api: bool = False) -> AsyncIterator[api_server.ApiServer]:
    configuration = client.Configuration()
    await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    async with client.ApiClient(configuration) as api:
        yield api_server.ApiServer(api, instance="test", gateway_api=gateway_api)


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Calls a check until its result is true, and returns it."""

    def until_true(check: Callable[[], Any], *, timeout_s: float = 120.0) -> Any:
        until = time.monotonic() + timeout_s
        while not (result := check()):
            assert time.monotonic() < until, f"still {result!r} after {timeout_s:.0f} s"
            time.sleep(0.1)
        return result

    return until_true


RULES = reconcile.Rules(
    images=render.Images(tidegate="tidegate:test", engine="tidegate-engine:test"),
    known=spec_problems.Known(
        policies=frozenset({"fcfs", "edf", "sjf", "two-lane", "urgency", "priority"}),
        rules=frozenset({"least-delay", "score"}),
        profiles=frozenset({"a100-70b-tp8"}),
        selectors=frozenset({"rules", "classifier", "llm"}),
    ),
    operator_namespace="tidegate-system",
    operator="tidegate-system/tidegate",
)


@pytest.fixture
def rules() -> reconcile.Rules:
    return RULES


@dataclasses.dataclass(frozen=True)
class Helm:
    plane: control_plane.ControlPlane
    chart: str = str(CHART)

    def run(self, *arguments: str) -> str:
        command = [str(self.plane.programs / "helm"), "--kubeconfig", str(self.plane.kubeconfig), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def rendered(self, namespace: str, *values: str, strings: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The chart's manifests for a release named tidegate. `strings` are values that are no numbers."""
        sets = [word for value in values for word in ("--set", value)]
        sets += [word for value in strings for word in ("--set-string", value)]
        text = self.run("template", "tidegate", self.chart, "-n", namespace, *sets)
        return [item for item in yaml.safe_load_all(text) if item]


@pytest.fixture
def helm(plane: control_plane.ControlPlane) -> Helm:
    return Helm(plane)


class _JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when no task is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        due = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and due:  # type: ignore[attr-defined]
            self._now = max(self._now, min(due))
        super()._run_once()  # type: ignore[misc]


@pytest.fixture
def in_virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in which hours of waiting take no time."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
            return runner.run(coroutine)

    return run


GOLDEN = pathlib.Path(__file__).parent / "golden"


def check_golden(name: str, actual: Any) -> None:
    """Compares with tests/operator/golden/NAME; TIDEGATE_UPDATE_GOLDEN=1 writes it instead, for a person to
    review."""
    file = GOLDEN / name
    if os.environ.get("TIDEGATE_UPDATE_GOLDEN"):
        dump = yaml.safe_dump_all if isinstance(actual, list) else yaml.safe_dump
        file.write_text(dump(actual, sort_keys=False, width=200))
    text = file.read_text()
    assert actual == (list(yaml.safe_load_all(text)) if isinstance(actual, list) else yaml.safe_load(text))


@pytest.fixture
def golden() -> Callable[[str, Any], None]:
    return check_golden


class Operator:
    """`tidegate operator` as a process, with exactly the rights that the chart gives it."""

    def __init__(self, plane: control_plane.ControlPlane, system: str, folder: pathlib.Path) -> None:
        self.system = system
        self.metrics_port = 0
        """Of the operator that was started last, like `health_port`."""
        self.health_port = 0
        self._plane = plane
        self._processes = background_processes.Processes(folder)
        self._numbers: dict[str, int] = {}
        self.token = plane.kubectl("create", "token", "tidegate", "-n", system).strip()

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.system}:tidegate"

    def start(self, identity: str, *namespaces: str, arguments: Sequence[str] = ()) -> None:
        command, env = self.command(identity, *namespaces, arguments=arguments)
        self._numbers[identity] = self._processes.start(identity, command, env=env)

    def command(
        self, identity: str, *namespaces: str, arguments: Sequence[str] = ()
    ) -> tuple[list[str], dict[str, str]]:
        """The program and its environment."""
        self.health_port, self.metrics_port = background_processes.free_ports(2)
        kubeconfig = self._plane.kubeconfig_for(self.token, f"{self.system}-{identity}")
        command = [
            sys.executable, "-m", "tidegate_operator", "--operator-namespace", self.system, "--lease", "tidegate",
            "--identity", identity, "--health-port", str(self.health_port), "--metrics-port", str(self.metrics_port),
            "--image", "tidegate:test",
            *(f"--namespace={name}" for name in namespaces), *arguments,
        ]  # fmt: skip
        return command, {**os.environ, "KUBECONFIG": str(kubeconfig)}

    def stop(self, *identities: str) -> None:
        self._processes.stop(*identities)

    def kill(self, identity: str) -> None:
        self._processes.kill(identity)

    def pause(self, identity: str) -> None:
        self._processes.pause(identity)

    def resume(self, identity: str) -> None:
        self._processes.resume(identity)

    def is_running(self, identity: str) -> bool:
        return self._processes.is_running(identity)

    def peak_mib(self, identity: str) -> float:
        """The most resident memory since its start."""
        status = pathlib.Path(f"/proc/{self._numbers[identity]}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024

    def said(self, identity: str) -> str:
        return self._processes.tail(identity, lines=1000)


def install(
    plane: control_plane.ControlPlane,
    system: str,
    *namespaces: str,
    folder: pathlib.Path,
    values: Sequence[str] = (),
) -> Operator:
    """Installs the chart's accounts and rights (not its pods) into the namespace `system`."""
    make_namespace(plane, system)
    names = ",".join(namespaces)
    manifests = Helm(plane).rendered(system, "crds.install=false", f"namespaces.names={{{names}}}", *values)
    rights = [item for item in manifests if item["kind"] not in ("Deployment", "Pod")]
    plane.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, rights)))
    return Operator(plane, system, folder)


@pytest.fixture
def install_chart(
    plane: control_plane.ControlPlane, namespace: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Operator]]:
    """Gives the chart's rights over the test's namespace, with these values, to operators that the test starts. What these
    said is printed when a test failed."""
    with contextlib.ExitStack() as stack:

        def installed(*values: str) -> Operator:
            operator = install(plane, f"{namespace}-system", namespace, folder=tmp_path, values=values)
            stack.callback(operator.stop)
            return operator

        yield installed
        if request.node.stash.get(_FAILED, False):
            for log in sorted(tmp_path.glob("*.log")):
                print(f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-100:]))


@pytest.fixture
def installed(install_chart: Callable[..., Operator]) -> Operator:
    """The chart's rights over the test's namespace, for operators that the test starts."""
    return install_chart()


@pytest.fixture
async def as_operator(plane: control_plane.ControlPlane, installed: Operator) -> AsyncIterator[api_server.ApiServer]:
    """The API server with the rights that the chart gives the operator."""
    async with connected(plane.kubeconfig_for(installed.token, f"{installed.system}-test")) as server:
        yield server


@pytest.fixture
def operator(installed: Operator, namespace: str) -> Operator:
    """An operator that serves the test's namespace."""
    installed.start("first", namespace)
    return installed
