"""Trouble in one served namespace, or with the ServingPool resource itself, stays where it is."""

import asyncio
import contextlib
import json
import types

import pytest
import yaml

import operator_doubles
from tidegate_operator import cluster, watches

from .conftest import CRD, install, make_namespace


@pytest.fixture
def neighbour(plane, namespace):
    return make_namespace(plane, f"{namespace}-neighbour")


def test_a_served_namespace_that_is_deleted_stops_nothing_in_the_others(
    plane, kubectl, namespace, neighbour, tmp_path, eventually
):
    operator = install(plane, f"{namespace}-system", namespace, neighbour, folder=tmp_path)
    try:
        operator.start("one", namespace, neighbour)
        eventually(lambda: "holds the Lease" in operator.said("one"))
        plane.kubectl("apply", "-n", neighbour, "-f", "-", stdin=json.dumps(operator_doubles.pool()))
        plane.kubectl("wait", "-n", neighbour, "spool/chat", "--for=condition=Ready", "--timeout=120s")
        plane.kubectl("delete", "namespace", neighbour, "--timeout=120s")
        kubectl("apply", "-f", "-", body=operator_doubles.pool())
        kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
        operator.stop("one")
        operator.start("two", namespace, neighbour)
        eventually(lambda: f"namespace {neighbour} is not served" in operator.said("two"))
        kubectl("scale", "spool/chat", "--replicas=1")
        kubectl("wait", "spool/chat", "--for=jsonpath={.status.engines}=1/1", "--timeout=120s")
        said = operator.said("one") + operator.said("two")
        assert "Traceback" not in said
        assert operator.said("one").count("is not served") <= 1, "it may have looked after the pool was deleted"
        assert operator.said("two").count("is not served") == 1
    finally:
        operator.stop()


@pytest.mark.timeout(600)
def test_pools_are_served_again_when_their_resource_was_deleted_and_came_back(
    plane, kubectl, namespace, installed, eventually
):
    installed.start("first", namespace)
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    try:
        plane.kubectl("delete", "crd", "servingpools.tidegate.dev", "--timeout=120s")
        eventually(lambda: "the cluster has no ServingPool resource" in installed.said("first"), timeout_s=120.0)
    finally:
        plane.add_kinds(CRD, "tidegate.dev/v1alpha1")
    eventually(lambda: f"namespace {namespace} is served again" in installed.said("first"), timeout_s=120.0)
    kubectl("apply", "-f", "-", body=operator_doubles.pool("again"))
    kubectl("wait", "spool/again", "--for=condition=Ready", "--timeout=120s")
    assert "Traceback" not in installed.said("first")


class Lister:
    """An API server that lists pools until their resource is deleted."""

    has_resource = True

    async def check_pools(self, namespace):
        if not self.has_resource:
            raise cluster.RejectedError("the cluster has no ServingPool resource")


async def test_watches_that_outlive_their_resource_end_after_a_pool_was_deleted(monkeypatch):
    begun, forgotten, lister = [], [], Lister()

    async def endless(namespace, events, stop):
        begun.append(events)
        while not stop.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(watches, "_kopf", endless)
    monkeypatch.setattr(watches, "DOUBTS_S", (0.01, 0.01))
    monkeypatch.setattr(watches, "RETRY_S", 0.01)
    monkeypatch.setattr(watches, "PAUSE_S", 0.01)
    receiver = types.SimpleNamespace(on_pool=lambda *_: None, on_child=lambda *_: None, on_pod=lambda *_: None)
    keeping = asyncio.create_task(watches.keep("prod", lister, receiver, forget=forgotten.append))
    async with asyncio.timeout(30):
        while not begun:
            await asyncio.sleep(0.01)
        begun[0].on_pool("DELETED", {})
        await asyncio.sleep(0.2)
        assert len(begun) == 1, "the resource is there: the watches go on"
        lister.has_resource = False
        begun[0].on_pool("DELETED", {})
        while not forgotten:
            await asyncio.sleep(0.01)
        lister.has_resource = True
        while len(begun) < 2:
            await asyncio.sleep(0.01)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping


def written(plane, user):
    """The resources that the user has created or changed."""
    records = map(json.loads, plane.audit_log.read_text().splitlines())
    writes = ("create", "update", "patch", "delete")
    return {
        record["objectRef"]["resource"]
        for record in records
        if record["user"]["username"] == user and record["verb"] in writes and record["responseStatus"]["code"] < 300
    }


def test_a_pool_that_two_releases_serve_belongs_to_the_first_until_it_is_handed_over(
    plane, kubectl, namespace, tmp_path, eventually
):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = install(plane, f"{namespace}-a", namespace, folder=tmp_path / "a")
    second = install(plane, f"{namespace}-b", namespace, folder=tmp_path / "b")
    for item in ("role", "rolebinding"):  # of the release that was installed last; both are named after the chart
        body = json.loads(kubectl("get", item, "tidegate", "-o", "json"))
        metadata = {"name": f"tidegate-{namespace}-a", "namespace": namespace}
        if item == "rolebinding":
            body["subjects"][0]["namespace"] = f"{namespace}-a"
        kubectl("create", "-f", "-", body={**body, "metadata": metadata})

    def owner():
        return json.loads(kubectl("get", "spool/chat", "-o", "json"))["metadata"]["annotations"][
            "tidegate.dev/operator"
        ]

    def image():
        return kubectl("get", "deployment/chat-gateway", "-o", "jsonpath={..image}")

    def generation():
        return kubectl("get", "deployment/chat-gateway", "-o", "jsonpath={.metadata.generation}")

    try:
        first.start("first", namespace)
        kubectl("apply", "-f", "-", body=operator_doubles.pool())
        kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
        assert owner() == f"{namespace}-a/tidegate"
        before = generation()
        second.start("second", namespace, arguments=["--image=other:2"])
        eventually(lambda: "OwnedByAnother" in kubectl("get", "events"))
        assert f"tidegate.dev/operator={namespace}-b/tidegate --overwrite" in second.said("second")
        kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"gateway": {"queue": {"maxRequests": 9}}}}')
        kubectl("wait", "spool/chat", "--for=jsonpath={.status.observedGeneration}=3", "--timeout=120s")
        kubectl("wait", "spool/chat", "--for=condition=Progressing=False", "--timeout=120s")
        assert (image(), int(generation())) == ("tidegate:test", int(before) + 1)
        assert written(plane, second.user) <= {"leases", "events"}
        kubectl("annotate", "spool/chat", f"tidegate.dev/operator={namespace}-b/tidegate", "--overwrite")
        kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"gateway": {"queue": {"maxRequests": 8}}}}')
        eventually(lambda: image() == "other:2")
    finally:
        first.stop()
        second.stop()


def test_a_resource_that_is_older_than_the_operator_is_named_in_a_condition_and_leaves_no_traceback(
    plane, kubectl, operator, eventually, tmp_path
):
    kubectl("apply", "-f", "-", body=operator_doubles.pool("before"))
    kubectl("wait", "spool/before", "--for=condition=Ready", "--timeout=120s")
    old = yaml.safe_load(CRD.read_text())
    schema = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del schema["spec"]["properties"]["engine"]["properties"]["startupTimeout"]
    del schema["status"]["properties"]["engines"]

    def stored():
        return kubectl("create", "--dry-run=server", "-o", "yaml", "-f", "-", body=operator_doubles.pool("probe"))

    def sentence(name):
        found = kubectl("get", f"spool/{name}", "-o", "jsonpath={.status.conditions[?(@.type=='Degraded')].message}")
        return "is older than this operator; upgrade it" in found

    try:
        plane.kubectl("replace", "-f", "-", stdin=json.dumps(old))
        eventually(lambda: "startupTimeout" not in stored())
        kubectl("apply", "-f", "-", body=operator_doubles.pool())
        eventually(lambda: sentence("chat"))
        assert len(kubectl("get", "deployments", "-l", "tidegate.dev/pool=before", "-o", "name").split()) == 3
    finally:
        plane.kubectl("replace", "-f", str(CRD))
        eventually(lambda: "startupTimeout" in stored())
    kubectl("annotate", "spool/chat", "seen=again")
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert "Traceback" not in operator.said("first")


def test_an_object_that_nests_deeply_stops_nothing(plane, kubectl, namespace, installed, eventually):
    """The API server takes 10,000 levels of objects and lists, and no parser of the operator takes as many."""
    nested = '{"f:a":' * 2500 + "{}" + "}" * 2500
    installed.start("first", namespace)
    for name in ("chat", "deep"):
        kubectl("apply", "-f", "-", body=operator_doubles.pool(name))
        kubectl("wait", f"spool/{name}", "--for=condition=Ready", "--timeout=120s")
    spec = f'{{"spec":{{"engine":{{"affinity":{{"nodeAffinity":{nested}}}}}}}}}'
    kubectl("patch", "spool/deep", "--type=merge", "-p", spec)
    status = f'{{"status":{{"steering":{nested}}}}}'
    kubectl("patch", "spool/deep", "--type=merge", "--subresource=status", "-p", status)
    manager = f'{{"manager":"m","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":{nested}}}'
    metadata = f'{{"name":"deep","labels":{{"tidegate.dev/pool":"chat"}},"managedFields":[{manager}]}}'
    config_map = f'{{"apiVersion":"v1","kind":"ConfigMap","metadata":{metadata}}}'
    plane.kubectl("-n", namespace, "create", "--validate=false", "-f", "-", stdin=config_map)
    kubectl("scale", "spool/chat", "--replicas=1")
    kubectl("wait", "spool/chat", "--for=jsonpath={.status.engines}=1/1", "--timeout=60s")
    eventually(lambda: f"pool {namespace}/deep has too many parts, or nests too deeply" in installed.said("first"))
    installed.stop("first")
    installed.start("again", namespace)
    kubectl("scale", "spool/chat", "--replicas=2")
    kubectl("wait", "spool/chat", "--for=jsonpath={.status.engines}=2/2", "--timeout=60s")
    kubectl("patch", "spool/deep", "--type=merge", "--subresource=status", "-p", '{"status":{"steering":null}}')
    kubectl("patch", "spool/deep", "--type=merge", "-p", '{"spec":{"replicas":1,"engine":{"affinity":null}}}')
    kubectl("wait", "spool/deep", "--for=jsonpath={.status.engines}=1/1", "--timeout=60s")
    assert "Traceback" not in installed.said("first") + installed.said("again")
