"""An edit of the embedded store reaches a pod that is not ready, and one of an earlier version is not rejected."""

import copy

import pytest

from tidegate_operator import plan, rollout

from . import simulated_deployments, test_render

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
