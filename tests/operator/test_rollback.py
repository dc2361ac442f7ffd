"""An edit whose engine never serves is taken back, on the API server and without a canary."""

import json

import pytest
from localkube import control_plane

import operator_doubles

from .test_operator import condition, ready_engines

SILENT = "silent-node"


@pytest.fixture
def silent_node(plane):
    """A node whose pods stay as the test states them. Other pods do not tolerate it."""
    node = control_plane.fake_gpu_node(SILENT, product="none", gpus=0)
    del node["metadata"]["annotations"]
    node["spec"] = {"taints": [{"key": SILENT, "effect": "NoSchedule"}]}
    plane.kubectl("create", "-f", "-", stdin=json.dumps(node))
    yield SILENT
    plane.kubectl("delete", f"node/{SILENT}", "--wait=false")


def images(kubectl):
    """The image of each engine's Deployment."""
    found = json.loads(kubectl("get", "deployments", "-l", "app.kubernetes.io/component=engine", "-o", "json"))["items"]
    return {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]["containers"][0]["image"] for item in found
    }  # fmt: skip


def test_an_edit_whose_engine_never_serves_is_taken_back_and_costs_no_engine(
    kubectl, operator, eventually, silent_node
):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    kubectl("wait", "spool/chat", "--for=condition=Progressing=False", "--timeout=120s")
    before, templates = ready_engines(kubectl), images(kubectl)
    assert len(before) == 3
    edit = {
        "image": "no-such-image:1",
        "nodeSelector": {"kubernetes.io/hostname": silent_node},
        "tolerations": [{"key": silent_node, "operator": "Exists"}],
    }
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"engine": edit}}))

    def started():
        """The pods that the edit has started."""
        found = json.loads(kubectl("get", "pods", "--field-selector", f"spec.nodeName={silent_node}", "-o", "json"))
        assert ready_engines(kubectl) == before
        return [pod["metadata"]["name"] for pod in found["items"]]

    (name,) = eventually(started)
    changed = {each for each, image in images(kubectl).items() if image == "no-such-image:1"}
    assert len(changed) == 1, "one node pool at a time"
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    status = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    patch = {"status": {"containerStatuses": [{**status, "state": {"waiting": waiting}}]}}
    kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", json.dumps(patch))

    (pool,) = changed
    trouble = f"{name}: ImagePullBackOff: no such image"
    told = f"{pool} did not serve with the new spec and runs the last one that served: {trouble}"
    # Until the pod is being deleted, its own trouble is told as well.
    eventually(lambda: condition(kubectl, "Degraded")["message"] == told)
    assert condition(kubectl, "Degraded")["reason"] == "RolledBack"
    eventually(lambda: images(kubectl) == templates)
    kubectl("delete", "pod", name, "--force", "--grace-period=0", check=False)  # the kubelet's part
    eventually(lambda: condition(kubectl, "Available")["status"] == "True")
    assert ready_engines(kubectl) == before
    assert "RolledBack" in kubectl("get", "events", "--field-selector", "reason=RolledBack")

    better = {"image": "better:1", "nodeSelector": None, "tolerations": None}
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"engine": better}}))
    eventually(lambda: set(images(kubectl).values()) == {"better:1"})
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert condition(kubectl, "Degraded")["status"] == "False"
    assert not ready_engines(kubectl) & before
