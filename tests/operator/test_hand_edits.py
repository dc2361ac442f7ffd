"""What people and other controllers do to a pool and its objects by hand."""

import datetime
import json

import pytest

import operator_doubles
from tidegate_operator import cluster as clusters
from tidegate_operator import reconcile
from tidegate_operator.render import gateway_api

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
ENGINES = "deployment/chat-engine-fast"


@pytest.fixture
def run(cluster, namespace, rules):
    async def once(api=cluster):
        return await reconcile.reconcile(api, namespace, "chat", rules=rules, now=NOW)

    return once


@pytest.fixture
def replicas(kubectl):
    return lambda: json.loads(kubectl("get", ENGINES, "-o", "json"))["spec"]["replicas"]


def create(kubectl, **node_pool):
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "fast", "replicas": 1, **node_pool}]))


async def test_more_engines_than_a_scale_may_state_run_and_the_status_tells_what_was_refused(
    run, cluster, kubectl, namespace
):
    pools = [{"name": f"p{number}", "replicas": 1000} for number in range(11)]
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=pools))
    assert await run() is reconcile.Result.REJECTED
    conditions = {item["type"]: item for item in (await cluster.pool(namespace, "chat"))["status"]["conditions"]}
    assert conditions["Degraded"]["reason"] == "Refused"
    assert conditions["Degraded"]["message"].startswith("ServingPool chat: "), conditions["Degraded"]
    assert len([each for each in await cluster.children(namespace, "chat") if each["kind"] == "Deployment"]) == 12


async def test_a_pool_whose_owner_cannot_be_written_is_told_and_left_alone(run, cluster, kubectl, namespace):
    class Guarded(operator_doubles.MortalCluster):
        async def claim(self, namespace, name, owner):
            raise clusters.RejectedError("admission webhook denied the request", status=403)

    create(kubectl)
    assert await run(Guarded(cluster, after=100)) is reconcile.Result.REJECTED
    conditions = {item["type"]: item for item in (await cluster.pool(namespace, "chat"))["status"]["conditions"]}
    assert "denied the request" in conditions["Degraded"]["message"]
    assert await cluster.children(namespace, "chat") == []


async def test_a_child_that_has_lost_its_label_keeps_its_engines_and_gets_the_label_back(run, kubectl, replicas):
    create(kubectl, scaledBy="external")
    await run()
    kubectl("scale", ENGINES, "--replicas=3")
    kubectl("label", ENGINES, "tidegate.dev/pool-")
    await run()
    assert replicas() == 3
    assert json.loads(kubectl("get", ENGINES, "-o", "json"))["metadata"]["labels"]["tidegate.dev/pool"] == "chat"


async def test_a_variable_that_a_person_adds_to_a_container_stays_and_leads_to_no_further_writes(run, cluster, kubectl):
    create(kubectl)
    await run()
    kubectl("set", "env", "deployment/chat-gateway", "X=1")
    await run()
    await run(operator_doubles.MortalCluster(cluster, after=0))
    assert '"X"' in kubectl("get", "deployment/chat-gateway", "-o", "json")


@pytest.mark.parametrize("found", [4, 0])
async def test_engines_that_another_autoscaler_sets_stay_beyond_the_bounds_of_the_node_pool(
    run, cluster, kubectl, replicas, namespace, found
):
    create(kubectl, scaledBy="autoscaler", minReplicas=1, maxReplicas=2)
    await run()
    kubectl("scale", ENGINES, f"--replicas={found}")
    await run()
    assert replicas() == (2 if found else 1), "nobody has decided yet"
    decision = {"reason": "another one", "since": reconcile.timestamp(NOW), "changes": []}
    await cluster.apply_status(namespace, "chat", {"autoscaling": decision}, writer="a-test")
    kubectl("scale", ENGINES, f"--replicas={found}")
    await run()
    assert replicas() == found


@pytest.mark.parametrize(("name", "is_one"), [("chat", True), ("a.b-c", True), ("a..b", False), ("a.-b", False)])
def test_a_class_has_an_objective_if_its_name_is_one_that_objects_may_have(name, is_one):
    assert bool(gateway_api.OBJECT_NAME.fullmatch(name)) is is_one
