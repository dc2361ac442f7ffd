"""A namespace with many large objects that have a pool's label costs the operator little memory."""

import json
import os

import pytest

import operator_doubles
from tidegate_operator import objects

IS_FULL = "TIDEGATE_FAULTS" in os.environ
MOST_MIB = 256
"""Half of the limit of the chart."""
CONFIG_MAPS, NETWORK_POLICIES = objects.CHILD_KINDS[1], objects.CHILD_KINDS[6]
LARGE = {"data": {"text": "x" * 900_000}}
MANY_PARTS = {"spec": {"podSelector": {}, "ingress": [{}] * 600_000}}
"""Each part takes as much memory as thirty bytes of text."""


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize(
    ("kind", "content", "count"),
    [(CONFIG_MAPS, LARGE, 450 if IS_FULL else 90), (NETWORK_POLICIES, MANY_PARTS, 32 if IS_FULL else 16)],
    ids=["ConfigMaps of 0.9 MB", "NetworkPolicies of 600,000 rules"],
)
async def test_large_objects_with_the_label_of_a_pool_do_not_fill_the_memory_of_the_operator(
    cluster, kubectl, installed, namespace, eventually, figure, kind, content, count
):
    installed.start("first", namespace)
    kubectl("create", "-f", "-", body=operator_doubles.pool(gateway={"replicas": 1}))
    eventually(lambda: kubectl("get", "deployments", "-o", "name").count("/") == 3)
    uid = (await cluster.pool(namespace, "chat"))["metadata"]["uid"]
    forged = {
        "apiVersion": "tidegate.dev/v1alpha1",
        "kind": "ServingPool",
        "name": "chat",
        "uid": uid,
        "controller": True,
    }
    for number in range(count):
        owners = [forged] if number % 3 == 0 else []
        labels = {"tidegate.dev/pool": ("chat", "chat", "absent", "")[number % 4]}
        metadata = {"name": f"large-{number}", "labels": labels, "ownerReferences": owners}
        await cluster.ask("POST", kind.path(namespace), {"metadata": metadata, **content})
    running = installed.peak_mib("first")
    installed.stop("first")
    installed.start("again", namespace)
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"gateway": {"replicas": 2}}}))
    eventually(lambda: json.loads(kubectl("get", "deployment/chat-gateway", "-o", "json"))["spec"]["replicas"] == 2)
    started = installed.peak_mib("again")
    most = max(running, started)
    figure(
        f"{count} {kind.plural} with the label of a pool: memory of an operator, running and started, MiB",
        f"{running:.0f}, {started:.0f}",
        goal=f"{MOST_MIB}",
        met=most < MOST_MIB,
    )
    assert most < MOST_MIB
    assert "Traceback" not in installed.said("first") + installed.said("again")
