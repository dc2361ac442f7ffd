"""An edit of the embedded store reaches a pod that is not ready, and one of an earlier version is not rejected."""

import asyncio
import copy
import json

import pytest

import operator_doubles
from tidegate_operator import plan, reconcile, rollout

from . import simulated_deployments, test_reconcile, test_render

POLICY = "podManagementPolicy"


def store(found):
    return test_render.pick(found, "StatefulSet", "chat-valkey")


def staged(body, observed):
    desired = test_render.manifests(state=body["spec"]["state"])
    return rollout.staged(body, desired, observed, [], now=simulated_deployments.NOW).desired


def writes(observed):
    """What an operator of this version writes to the store of a pool whose spec does not change."""
    todo = plan.steps("0123", staged(test_render.body(), observed), observed)
    return [item for item in todo.apply if item["kind"] == "StatefulSet"]


def written(desired):
    """The objects that the API server keeps of what `plan` applies."""
    found = []
    for manifest in copy.deepcopy(plan.steps("0123", desired, []).apply):
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"))
        status = {name: manifest.get("spec", {}).get("replicas", 1) for name in counts}
        manifest["metadata"]["generation"] = 1
        found.append({**manifest, "status": {"observedGeneration": 1, **status}})
    return found


def created_by_an_earlier_version():
    desired = copy.deepcopy(staged(test_render.body(), []))
    del store(desired)["spec"][POLICY]
    observed = written(desired)
    store(observed)["spec"][POLICY] = "OrderedReady"  # as the API server completes it
    return observed


def edited():
    body = test_render.body()
    valkey = body["spec"]["state"]["valkey"]
    changed = {**valkey, "resources": {"requests": {"memory": "3Gi"}}}
    return test_render.body(state={"valkey": changed})


def test_an_edit_of_a_new_store_reaches_a_pod_that_is_not_ready():
    observed = written(staged(test_render.body(), []))
    assert store(observed)["spec"][POLICY] == "Parallel"
    assert writes(observed) == []
    assert store(staged(edited(), observed))["spec"][POLICY] == "Parallel"


def test_an_upgrade_does_not_touch_a_store_of_an_earlier_version():
    observed = created_by_an_earlier_version()
    assert writes(observed) == []


@pytest.mark.parametrize("policy", ["OrderedReady", "Parallel"])
def test_an_edit_of_a_store_does_not_change_what_kubernetes_forbids_to_change(policy):
    observed = created_by_an_earlier_version()
    store(observed)["spec"][POLICY] = policy
    after = store(staged(edited(), observed))["spec"]
    assert after.get(POLICY, "OrderedReady") == policy
    (container,) = after["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["memory"] == "3Gi"


async def test_a_store_that_an_earlier_version_created_takes_an_edit(cluster, kubectl, namespace, rules):
    """Kubernetes forbids another `podManagementPolicy`, which earlier versions did not state."""

    def store():
        return json.loads(kubectl("get", "statefulset/chat-valkey", "-o", "json"))

    valkey = {"embedded": True, "storage": {"size": "1Gi"}}
    kubectl("create", "-f", "-", body=operator_doubles.pool(state={"valkey": valkey}))
    await test_reconcile.run(cluster, namespace, rules)
    earlier = store()
    assert earlier["spec"].pop("podManagementPolicy") == "Parallel"
    for name in ("uid", "resourceVersion", "creationTimestamp"):
        earlier["metadata"].pop(name)
    kubectl("delete", "statefulset/chat-valkey", "--cascade=orphan")
    kubectl("create", "-f", "-", body=earlier)
    valkey["resources"] = {"requests": {"memory": "300Mi"}}
    kubectl("replace", "-f", "-", body=operator_doubles.pool(state={"valkey": valkey}))
    async with asyncio.timeout(120):
        while True:
            assert await test_reconcile.run(cluster, namespace, rules) is reconcile.Result.SETTLED
            spec_of_pods = store()["spec"]["template"]["spec"]
            if spec_of_pods["containers"][0]["resources"]["requests"]["memory"] == "300Mi":
                break
            await asyncio.sleep(0.2)
    assert store()["spec"]["podManagementPolicy"] == "OrderedReady"
