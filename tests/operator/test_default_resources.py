"""What the containers of a pool request and may take, where its spec states nothing."""

import asyncio
import json
import pathlib

import pytest
import yaml

import operator_doubles
from tidegate_operator import rollout
from tidegate_operator.render import default_resources

from . import simulated_deployments, test_reconcile, test_render

LIMIT = {"cpu": "4", "memory": "4Gi"}
DEFAULT = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": LIMIT}


def completed(**given):
    return default_resources.completed(given, DEFAULT)


def container(kind, name, **changes):
    found = test_render.manifests(**changes)
    return test_render.pick(found, kind, name)["spec"]["template"]["spec"]["containers"][0]["resources"]


def engine(*, kind="vllm", common=None, **node_pool):
    """The resources of an engine; `common` are further fields of `spec.engine`, and the others those of its node pool."""
    stated = {**test_render.body()["spec"]["engine"], "kind": kind}
    stated.pop("offload", None)
    own = {**test_render.body()["spec"]["nodePools"][0], "tensorParallel": 1, **node_pool}
    return container("Deployment", "chat-engine-a100", engine={**stated, **(common or {})}, nodePools=[own])


def test_what_is_not_stated_is_completed():
    assert completed() == DEFAULT
    assert completed(requests={"cpu": "2"}) == {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": LIMIT}
    assert completed(limits={"x.io/y": "1"})["limits"] == {"x.io/y": "1", **LIMIT}


def test_a_limit_without_a_request_is_the_request_too_as_in_every_pod():
    assert completed(limits={"memory": "512Mi"})["requests"] == {"cpu": "1"}
    assert completed(limits={"cpu": "8", "memory": "8Gi"}) == {"limits": {"cpu": "8", "memory": "8Gi"}}


def test_a_default_limit_is_at_least_twice_the_request():
    assert completed(requests={"cpu": "2500m", "memory": "64Gi"})["limits"] == {"cpu": "5", "memory": "128Gi"}


@pytest.mark.parametrize("zero", ["0", 0, "0Mi"])
def test_a_limit_of_zero_stands_for_none(zero):
    assert completed(limits={"cpu": zero}) == {**DEFAULT, "limits": {"memory": "4Gi"}}
    assert completed(limits={"cpu": zero, "memory": zero}) == {"requests": DEFAULT["requests"]}


def test_the_resources_of_an_engine_grow_with_its_devices():
    assert engine() == {
        "requests": {"cpu": "2", "memory": "8Gi"},
        "limits": {"cpu": "16", "memory": "40Gi", "nvidia.com/gpu": "1"},
    }
    assert engine(tensorParallel=8) == {
        "requests": {"cpu": "9", "memory": "36Gi"},
        "limits": {"cpu": "72", "memory": "152Gi", "nvidia.com/gpu": "8"},
    }
    claimed = engine(tensorParallel=8, resourceClaimTemplateName="gpu")
    assert (claimed["requests"]["cpu"], claimed["limits"]["cpu"]) == ("9", "72")


def test_memory_for_shared_blocks_and_for_offloaded_kv_is_added():
    found = engine(common={"offload": "20Gi", "sharedMemory": "16Gi"})
    assert (found["requests"]["memory"], found["limits"]["memory"]) == ("28Gi", "68Gi")


def test_an_engine_that_computes_on_the_cpu_has_no_limits():
    assert engine(gpus=0) == {"requests": {"cpu": "1", "memory": "4Gi"}}


def test_the_gateway_the_store_and_a_simulated_engine_have_limits_that_the_spec_may_change():
    assert engine(kind="sim") == default_resources.SIMULATED
    assert container("Deployment", "chat-gateway") == default_resources.GATEWAY
    assert container("StatefulSet", "chat-valkey") == default_resources.STORE
    state = {"valkey": {"embedded": True, "resources": {"limits": {"memory": "9Gi"}}}}
    assert container("StatefulSet", "chat-valkey", state=state)["limits"] == {"cpu": "4", "memory": "9Gi"}
    gateway = {**test_render.body()["spec"]["gateway"], "resources": {"limits": {"memory": "9Gi", "cpu": 0}}}
    assert container("Deployment", "chat-gateway", gateway=gateway) == {
        "requests": {"cpu": "250m"},
        "limits": {"memory": "9Gi"},
    }


def test_the_resource_has_the_same_default_for_the_gateway(kubectl):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    stored = json.loads(kubectl("get", "spool/chat", "-o", "jsonpath={.spec.gateway.resources}"))
    assert stored == {"requests": default_resources.GATEWAY["requests"]}


HARD = "requests.cpu=1k,limits.cpu=1k,requests.memory=9Ti,limits.memory=9Ti"


@pytest.mark.parametrize("kind", ["sim", "vllm"])
async def test_a_default_pool_starts_in_a_namespace_with_quotas(cluster, kubectl, namespace, rules, eventually, kind):
    kubectl("create", "quota", "all", f"--hard={HARD}")
    eventually(lambda: kubectl("get", "quota/all", "-o", "jsonpath={.status.used}"))
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine={"kind": kind}))
    async with asyncio.timeout(120):
        while True:
            await test_reconcile.run(cluster, namespace, rules)
            found = (await cluster.pool(namespace, "chat"))["status"]["conditions"]
            if {item["type"]: item["status"] for item in found}["Ready"] == "True":
                break
            await asyncio.sleep(0.2)
    assert json.loads(kubectl("get", "quota/all", "-o", "jsonpath={.status.used}")).keys() == {
        "requests.cpu", "requests.memory", "limits.cpu", "limits.memory",
    }  # fmt: skip


STATUS = {"observedGeneration": 1} | dict.fromkeys(
    ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 2
)


EARLIER = pathlib.Path(__file__).parent / "golden" / "chat.workloads-without-default-resources.yaml"


def test_an_upgrade_that_brings_new_defaults_restarts_nothing():
    """Workloads of an operator without the defaults keep their templates until the spec changes."""
    body = test_render.body()
    before = list(yaml.safe_load_all(EARLIER.read_text()))
    first = rollout.staged(body, before, [], [], now=simulated_deployments.NOW).desired
    observed = [{**item, "metadata": {**item["metadata"], "generation": 1}, "status": STATUS} for item in first]
    after = rollout.staged(body, test_render.manifests(), observed, [], now=simulated_deployments.NOW).desired

    def templates(found):
        return {
            (item["kind"], item["metadata"]["name"]): item["spec"]["template"]
            for item in found
            if "template" in item.get("spec", {})
        }

    assert templates(test_render.manifests()) != templates(first)
    assert templates(after) == templates(first)
    assert len(templates(first)) == 4
    edited = test_render.body(engine={**body["spec"]["engine"], "image": "x:2"})
    changed = rollout.staged(
        edited, test_render.manifests(engine=edited["spec"]["engine"]), observed, [], now=simulated_deployments.NOW
    ).desired
    assert templates(changed) != templates(first)
