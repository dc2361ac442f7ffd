"""An API server that dies, hangs or forgets what it has sent, seen by the operator's process.

`make test` takes it away for seconds, `make faults` for minutes.
"""

import json
import os
import time
import urllib.error
import urllib.request

import pytest

import operator_doubles

from . import conftest

IS_FULL = "TIDEGATE_FAULTS" in os.environ
DEAD_S, HUNG_S = (60, 300) if IS_FULL else (20, 20)
"""Longer than the operator's Lease lasts."""
GOAL_S = 75
SETTLE_S = 180

pytestmark = pytest.mark.timeout(HUNG_S + 600)
"""A whole control plane starts."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    """A control plane of these tests' own, whose processes they kill."""
    with conftest.control_plane_with_gpus(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


@pytest.fixture
def served(plane, kubectl, operator):
    """A pool that is ready; gives what exists, before the fault."""
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    kubectl("wait", "spool/chat", "--for=condition=Progressing=False", "--timeout=120s")
    return children(kubectl)


def children(kubectl):
    """Name and UID of each object of the pool, pods included."""
    kinds = "deployments,statefulsets,services,configmaps,pods"
    items = json.loads(kubectl("get", kinds, "-l", "tidegate.dev/pool=chat", "-o", "json"))["items"]
    return {(item["kind"], item["metadata"]["name"]): item["metadata"]["uid"] for item in items}


def is_followed(kubectl, engines):
    """Whether the operator has carried out an edit to this number of engines, and says so."""
    pool = json.loads(kubectl("get", "spool/chat", "-o", "json"))
    is_seen = pool["status"]["observedGeneration"] == pool["metadata"]["generation"]
    ready = sum(node_pool["ready"] for node_pool in pool["status"]["nodePools"])
    return is_seen and ready == engines


class Kubelet:
    """Starts the operator's process again whenever it has ended, as the kubelet does with its container."""

    def __init__(self, operator, namespace):
        self.restarts = 0
        self._operator = operator
        self._namespace = namespace

    def keep(self, seconds):
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if not self._operator.is_running("first"):
                self.restarts += 1
                self._operator.start("first", self._namespace)
            time.sleep(0.2)


@pytest.fixture
def assert_recovers(kubectl, operator, eventually, served, figure, request):
    """No object was replaced, and an edit arrives."""

    def check():
        before, began_at_s = served, time.monotonic()
        kubectl("scale", "spool/chat", "--replicas=5")
        eventually(lambda: is_followed(kubectl, 5), timeout_s=SETTLE_S)
        took_s = time.monotonic() - began_at_s
        figure(
            f"{request.node.name}: an edit arrives after", f"{took_s:.0f} s", goal=f"{GOAL_S} s", met=took_s <= GOAL_S
        )
        after = children(kubectl)
        assert before.items() <= after.items(), "what served serves on"
        assert sorted(kind for kind, _ in after.keys() - before.keys()) == ["Pod", "Pod"]
        assert operator.is_running("first"), operator.said("first")
        assert "Traceback" not in operator.said("first")

    return check


def test_an_api_server_that_dies_costs_nothing(plane, namespace, operator, assert_recovers):
    kubelet = Kubelet(operator, namespace)
    plane.processes.kill("kube-apiserver")
    kubelet.keep(DEAD_S)
    plane.processes.restart("kube-apiserver")
    plane.wait()
    kubelet.keep(10)
    assert_recovers()
    assert kubelet.restarts <= 1, "whoever cannot renew the Lease ends once, and then waits"


def probed(operator, path):
    """The status of a probe of the process that runs now; 0 while it starts."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.health_port}{path}", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_readiness_turns_red_while_the_api_server_hangs(plane, namespace, operator, eventually):
    kubelet = Kubelet(operator, namespace)

    def told(path):
        kubelet.keep(0.5)
        return probed(operator, path)

    eventually(lambda: told("/readyz") == 200)
    plane.processes.pause("kube-apiserver")
    try:
        eventually(lambda: told("/readyz") == 503)
        assert told("/healthz") == 200, "another restart would not help"
    finally:
        plane.processes.resume("kube-apiserver")
    plane.wait()
    eventually(lambda: told("/readyz") == 200)
    assert kubelet.restarts <= 1


@pytest.mark.skipif(not IS_FULL, reason="takes minutes; `make faults` runs it")
def test_an_api_server_that_hangs_costs_nothing(plane, namespace, operator, assert_recovers):
    kubelet = Kubelet(operator, namespace)
    plane.processes.pause("kube-apiserver")
    kubelet.keep(HUNG_S)
    plane.processes.resume("kube-apiserver")
    plane.wait()
    kubelet.keep(10)
    assert_recovers()
    assert kubelet.restarts <= 1


def test_changes_that_the_api_server_no_longer_knows_are_seen(plane, kubectl, operator, eventually, assert_recovers):
    """The operator's watches go on from a version that etcd has compacted, so the API server answers 410 Gone."""
    operator.pause("first")
    kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"tenants": [{"name": "search", "weight": 3}]}}')
    plane.kubectl("create", "namespace", "later")
    version = int(plane.kubectl("get", "namespace/later", "-o", "jsonpath={.metadata.resourceVersion}"))
    body = json.dumps({"revision": version, "physical": True}).encode()
    with urllib.request.urlopen(f"{plane.store}/v3/kv/compaction", body) as answer:
        assert answer.status == 200
    plane.processes.kill("kube-apiserver")  # or it answers from its memory
    plane.processes.restart("kube-apiserver")
    plane.wait()
    operator.resume("first")
    eventually(lambda: "search" in kubectl("get", "configmap/chat-gateway", "-o", "yaml"), timeout_s=SETTLE_S)
    assert_recovers()
