"""A namespace with many large objects that have a pool's label costs the operator little memory."""

import json
import os

import pytest

import operator_doubles
from tidegate_operator import objects

OBJECTS, TEXT_BYTES = (450 if "TIDEGATE_FAULTS" in os.environ else 90), 900_000
MOST_MIB = 256
"""Half of the limit of the chart."""


@pytest.mark.timeout(600)
async def test_large_objects_with_the_label_of_a_pool_do_not_fill_the_memory_of_the_operator(
    cluster, kubectl, installed, namespace, eventually, figure
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
    for number in range(OBJECTS):
        owners = [forged] if number % 3 == 0 else []
        labels = {"tidegate.dev/pool": ("chat", "chat", "absent", "")[number % 4]}
        metadata = {"name": f"large-{number}", "labels": labels, "ownerReferences": owners}
        body = {"metadata": metadata, "data": {"text": "x" * TEXT_BYTES}}
        await cluster.ask("POST", objects.CONFIG_MAPS.path(namespace), body)
    running = installed.peak_mib("first")
    installed.stop("first")
    installed.start("again", namespace)
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"gateway": {"replicas": 2}}}))
    eventually(lambda: json.loads(kubectl("get", "deployment/chat-gateway", "-o", "json"))["spec"]["replicas"] == 2)
    started = installed.peak_mib("again")
    most = max(running, started)
    figure(
        f"{OBJECTS} ConfigMaps of 0.9 MB with the label of a pool: memory of an operator, running and started, MiB",
        f"{running:.0f}, {started:.0f}",
        goal=f"{MOST_MIB}",
        met=most < MOST_MIB,
    )
    assert most < MOST_MIB
    assert "Traceback" not in installed.said("first") + installed.said("again")
