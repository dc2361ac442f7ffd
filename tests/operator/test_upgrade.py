"""An operator of another version, with other images and other templates, on the API server: what works goes on."""

import contextlib
import json
import urllib.request

import pytest

import operator_doubles

POOLS = 24
OF_VLLM = 6
"""Of the pools; the others have simulated engines."""
OTHER = ["--image=tidegate:2", "--engine-image=tidegate-engine:2", "--image-pull-policy=Always", "--ipv6"]
"""Each changes the templates that the operator renders."""


def pool(number):
    engine = {"kind": "vllm" if number < OF_VLLM else "sim"}
    name = f"pool-{number}"
    return operator_doubles.pool(name, engine=engine, nodePools=[{"name": "a"}], gateway={"replicas": 1})


def items(kubectl, kinds):
    return json.loads(kubectl("get", kinds, "-l", "app.kubernetes.io/part-of=tidegate", "-o", "json"))["items"]


def workloads(kubectl):
    """The spec of each workload. The generation of a Deployment grows with its annotations too."""
    found = items(kubectl, "deployments,statefulsets")
    return {(item["kind"], item["metadata"]["name"]): item["spec"] for item in found}


def pods(kubectl):
    found = json.loads(kubectl("get", "pods", "-o", "json"))["items"]
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in found}


def have(kubectl, condition, status, *, generation=0):
    """Whether all pools show the condition, for a spec of this generation or a later one."""
    seen = [
        item
        for body in json.loads(kubectl("get", "spool", "-o", "json"))["items"]
        for item in body.get("status", {}).get("conditions", ())
        if (item["type"], item["status"]) == (condition, status) and item["observedGeneration"] >= generation
    ]
    return len(seen) == POOLS


def checks(operator):
    """Reconciles that the operator has ended; none before it serves its figures."""
    lines = []
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics") as answer,
    ):
        lines = answer.read().decode().splitlines()
    named = [
        line for line in lines if line.startswith("tidegate_operator_work_seconds_count") and '"reconcile"' in line
    ]
    return float(named[0].split()[-1]) if named else 0.0


@pytest.mark.timeout(900)
def test_an_operator_of_another_version_restarts_nothing(kubectl, installed, namespace, eventually):
    installed.start("old", namespace)
    bodies = [pool(number) for number in range(POOLS)]
    kubectl("create", "-f", "-", body={"apiVersion": "v1", "kind": "List", "items": bodies})
    eventually(lambda: have(kubectl, "Ready", "True"), timeout_s=400)
    eventually(lambda: have(kubectl, "Progressing", "False"), timeout_s=60)
    installed.stop("old")
    before = workloads(kubectl), pods(kubectl)
    assert (len(before[0]), len(before[1])) == (3 * POOLS, 3 * POOLS)

    installed.start("new", namespace, arguments=OTHER)
    eventually(lambda: checks(installed) >= 2 * POOLS, timeout_s=200)
    assert (workloads(kubectl), pods(kubectl)) == before

    # The new operator follows the pools: an edit that running gateways take over touches no workload either.
    generation = max(
        body["metadata"]["generation"] for body in json.loads(kubectl("get", "spool", "-o", "json"))["items"]
    )
    for number in range(POOLS):
        kubectl("patch", f"spool/pool-{number}", "--type=merge", "-p", '{"spec": {"tenants": [{"name": "search"}]}}')
    eventually(lambda: have(kubectl, "Ready", "True", generation=generation + 1), timeout_s=200)
    assert (workloads(kubectl), pods(kubectl)) == before

    # An edit of the engines brings the new operator's templates to one pool, and to no other.
    patch = '{"spec": {"engine": {"env": [{"name": "A", "value": "b"}]}}}'
    kubectl("patch", f"spool/pool-{POOLS - 1}", "--type=merge", "-p", patch)
    name = f"deployment/pool-{POOLS - 1}-engine-a"
    eventually(lambda: kubectl("get", name, "-o", "jsonpath={..containers[0].image}") == "tidegate:2")
    changed = {key for key, spec in workloads(kubectl).items() if spec != before[0][key]}
    assert {name.rpartition("/")[2]} <= {each for _, each in changed} <= {
        f"pool-{POOLS - 1}-{part}" for part in ("engine-a", "gateway")
    }  # fmt: skip
