"""Profiles from a ConfigMap on the real API server: reconciled step by step, and by an operator that lives through it."""

import datetime
import json

import pytest
import yaml

import operator_doubles
from tidegate_operator import pool_profiles, reconcile
from tidegate_policy import cost

from . import test_own_profile, test_rbac, test_reconcile

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
KEY = "h100-8b.yaml"
POOL = operator_doubles.pool(
    nodePools=[{"name": "fast", "profile": "h100-8b"}], profilesConfigMapRef={"name": "profiles"}
)


def config_map(**data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "profiles"}, "data": data}


def give(kubectl, text):
    kubectl("apply", "-f", "-", body=config_map(**{KEY: text}))


async def run(cluster, namespace, rules):
    result = await reconcile.reconcile(cluster, namespace, "chat", rules=rules, now=NOW)
    body = await cluster.pool(namespace, "chat")
    (degraded,) = [item for item in body["status"]["conditions"] if item["type"] == "Degraded"]
    return result, degraded


async def specs(cluster, namespace):
    """What the operator wrote, without what controllers add."""
    children = await cluster.children(namespace, "chat")
    return {
        (child["kind"], child["metadata"]["name"]): child.get("spec", child.get("data"))
        for child in children
        if child["kind"] in ("Deployment", "ConfigMap")
    }


async def step_s(cluster, namespace):
    """The first coefficient in the settings of the gateways, and in the profile of the engines."""
    found = await specs(cluster, namespace)
    settings = yaml.safe_load(found["ConfigMap", "chat-gateway"]["gateway.yaml"])
    engines = yaml.safe_load(found["ConfigMap", "chat-engine-fast"]["profile.yaml"])
    return cost.from_mapping(settings["services"][0]["cost"]).step_s, engines["cost"]["step_s"]


async def test_a_profile_that_goes_wrong_changes_nothing_until_it_is_mended(cluster, kubectl, namespace, rules):
    give(kubectl, test_own_profile.TEXT)
    kubectl("create", "-f", "-", body=POOL)
    assert (await run(cluster, namespace, rules))[1]["status"] == "False"
    assert await step_s(cluster, namespace) == (0.008, 0.008)
    before = await specs(cluster, namespace)
    give(kubectl, "cost: {step_s: -1}")
    result, degraded = await run(cluster, namespace, rules)
    assert result is reconcile.Result.SETTLED  # it is looked at again with every check of the pool
    assert (degraded["status"], degraded["reason"]) == ("True", pool_profiles.REASON)
    assert "correct h100-8b.yaml in the ConfigMap profiles" in degraded["message"]
    kubectl("delete", "configmap/profiles")
    _, degraded = await run(cluster, namespace, rules)
    assert "there is no ConfigMap profiles in this namespace; create it" in degraded["message"]
    assert await specs(cluster, namespace) == before
    # Other edits are carried out meanwhile.
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps({"spec": {"gateway": {"replicas": 1}}}))
    await run(cluster, namespace, rules)
    assert (await specs(cluster, namespace))["Deployment", "chat-gateway"]["replicas"] == 1
    give(kubectl, test_own_profile.FASTER)
    _, degraded = await run(cluster, namespace, rules)
    assert degraded["status"] == "False"
    assert await step_s(cluster, namespace) == (0.004, 0.004)
    after = await specs(cluster, namespace)
    assert after["Deployment", "chat-gateway"]["template"] != before["Deployment", "chat-gateway"]["template"]


async def test_a_new_pool_without_its_profile_starts_nothing_and_says_what_to_do(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=POOL)
    result, degraded = await run(cluster, namespace, rules)
    assert (result, degraded["reason"]) == (reconcile.Result.SETTLED, "InvalidSpec")
    assert "spec.nodePools[fast].profile: there is no ConfigMap profiles in this namespace" in degraded["message"]
    assert await specs(cluster, namespace) == {}


async def test_a_pool_that_goes_back_to_a_shipped_profile_keeps_no_config_map(cluster, kubectl, namespace, rules):
    give(kubectl, test_own_profile.TEXT)
    kubectl("create", "-f", "-", body=POOL)
    await run(cluster, namespace, rules)
    await test_reconcile.run_until_settled(cluster, kubectl, namespace, rules)
    patch = {"spec": {"nodePools": [{"name": "fast", "profile": "a100-70b-tp8"}]}}
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps(patch))
    await run(cluster, namespace, rules)
    assert ("ConfigMap", "chat-engine-fast") in await specs(cluster, namespace)  # old engines still read it
    await test_reconcile.run_until_settled(cluster, kubectl, namespace, rules)
    found = await specs(cluster, namespace)
    assert ("ConfigMap", "chat-engine-fast") not in found
    (container,) = found["Deployment", "chat-engine-fast"]["template"]["spec"]["containers"]
    assert "--profile=a100-70b-tp8" in container["args"]


@pytest.mark.parametrize("name", ["../secrets/x", "Profiles", "a b", ""])
def test_a_name_that_no_config_map_has_is_refused_at_once(kubectl, name):
    body = {**POOL, "spec": {**POOL["spec"], "profilesConfigMapRef": {"name": name}}}
    answer = kubectl("create", "--dry-run=server", "-f", "-", body=body, check=False)
    assert "created" not in answer


def test_an_operator_takes_over_what_becomes_of_the_config_map_without_a_restart(
    plane, kubectl, installed, namespace, eventually
):
    installed.start("first", namespace, arguments=("--resync=1s",))
    kubectl("create", "-f", "-", body=POOL)

    def degraded():
        conditions = json.loads(kubectl("get", "spool/chat", "-o", "json")).get("status", {}).get("conditions", ())
        return next((item["message"] for item in conditions if item["type"] == "Degraded"), "")

    def first_coefficient():
        text = kubectl("get", "configmap/chat-engine-fast", "-o", "jsonpath={.data.profile\\.yaml}", check=False)
        return yaml.safe_load(text)["cost"]["step_s"] if text.startswith("cost") else None

    eventually(lambda: "there is no ConfigMap profiles" in degraded())
    give(kubectl, test_own_profile.TEXT)
    eventually(lambda: first_coefficient() == 0.008)
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=60s")
    give(kubectl, "cost: 3")
    eventually(lambda: "has no mapping 'cost'; until then the last usable one counts" in degraded())
    assert first_coefficient() == 0.008
    give(kubectl, test_own_profile.FASTER)
    eventually(lambda: first_coefficient() == 0.004)
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=60s")
    installed.stop()
    seen, forbidden = test_rbac.asked(plane, installed.user)
    assert forbidden == []
    assert ("", "configmaps", "get") in seen
