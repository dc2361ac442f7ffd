"""One reconcile at a time against the real API server; what wakes it is not tested here."""

import asyncio
import datetime
import json

import pytest
import yaml

import operator_doubles
from tidegate_operator import objects, plan, pool_status, reconcile, render, replica_allocation, rollout, spec

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def identities(children, *, owned_by):
    """(kind, name) of each child, after a check that all have that owner."""
    assert {objects.controller_uid(child) for child in children} <= {owned_by}
    return sorted((child["kind"], child["metadata"]["name"]) for child in children)


async def run(api, namespace, rules, name="chat"):
    return await reconcile.reconcile(api, namespace, name, rules=rules, now=NOW)


def conditions(body):
    return {item["type"]: item for item in body["status"]["conditions"]}


async def test_a_pool_gets_its_children_and_a_second_reconcile_writes_nothing(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    assert await run(cluster, namespace, rules) is reconcile.Result.SETTLED
    pool = await cluster.pool(namespace, "chat")
    assert identities(await cluster.children(namespace, "chat"), owned_by=pool["metadata"]["uid"]) == sorted(
        [
            ("ConfigMap", "chat-gateway"),
            ("Deployment", "chat-engine-fast"), ("Deployment", "chat-engine-slow"), ("Deployment", "chat-gateway"),
            ("NetworkPolicy", "chat-engine"), ("NetworkPolicy", "chat-gateway"), ("NetworkPolicy", "chat-valkey"),
            ("PodDisruptionBudget", "chat-engine-fast"), ("PodDisruptionBudget", "chat-engine-slow"),
            ("PodDisruptionBudget", "chat-gateway"),
            ("Service", "chat-engine-fast"), ("Service", "chat-engine-slow"), ("Service", "chat-gateway"),
            ("Service", "chat-gateway-internal"), ("Service", "chat-valkey"),
            ("ServiceAccount", "chat-engine"), ("ServiceAccount", "chat-gateway"), ("ServiceAccount", "chat-valkey"),
            ("StatefulSet", "chat-valkey"),
        ]
    )  # fmt: skip
    kubectl("rollout", "status", "statefulset/chat-valkey", "--timeout=120s")
    await run_until_settled(cluster, kubectl, namespace, rules)
    watchful = operator_doubles.MortalCluster(cluster, after=0)
    await run(watchful, namespace, rules)  # any write would be its death
    assert conditions(await cluster.pool(namespace, "chat"))["Ready"]["status"] == "True"


@pytest.mark.parametrize("kind", ["vllm", "sim"])
async def test_a_full_spec_settles_too(cluster, kubectl, namespace, rules, kind):
    """The API server returns every field of a full spec as it was stated."""
    more = {
        "engine": {
            "kind": kind, "image": "x:1", "env": [{"name": "A", "value": ""}, {"name": "B", "value": "b"}],
            "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
            "volumes": [{"name": "models", "emptyDir": {}}], "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            "tolerations": [{"operator": "Exists"}], "nodeSelector": {"kubernetes.io/hostname": "a100-0"},
            "podAnnotations": {"a": "b"}, "priorityClassName": "system-node-critical", "offload": "4Gi",
            "serviceAccountName": "default",
        },
        "nodePools": [
            {
                "name": "a", "accelerators": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-H200"], "tensorParallel": 2, "args": ["--x"],
                "image": "x:2", "env": [{"name": "A", "value": "a"}], "resources": {"requests": {"cpu": "1500m"}},
                "podAnnotations": {"b": "c"}, "tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 5}],
                "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}},
                ]}},
            },
        ],
        "gateway": {
            "tolerations": [{"key": "a", "operator": "Equal", "value": "b"}], "podAnnotations": {"a": "b"},
            "serviceAnnotations": {"c": "d"}, "affinity": {"podAntiAffinity": {}},
        },
        "state": {"valkey": {
            "embedded": True, "storage": {"size": "1Gi"}, "podAnnotations": {"a": "b"},
            "tolerations": [{"operator": "Exists"}], "resources": {"limits": {"memory": "8192Mi"}},
        }},
        "caBundle": {"configMapName": "company", "key": "ca.crt"},
    }  # fmt: skip
    kubectl("create", "-f", "-", body=operator_doubles.pool(**more))
    await run(cluster, namespace, rules)
    wait_until_settled(kubectl)
    await run(cluster, namespace, rules)  # records that the engines served
    wait_until_settled(kubectl)
    children = await cluster.children(namespace, "chat")
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    desired = render.manifests(
        pool, replica_allocation.desired(pool), images=rules.images, operator_namespace="tidegate-system"
    )
    staged = rollout.staged(
        await cluster.pool(namespace, "chat"), desired, children, [], now=datetime.datetime.now(datetime.UTC)
    )
    assert plan.steps(pool.uid, staged.desired, children) == plan.Steps(apply=(), delete=(), taken=())


async def test_changes_of_others_are_undone_and_their_additions_stay(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    kubectl("scale", "deployment/chat-engine-fast", "--replicas=7")
    kubectl("delete", "service/chat-gateway")
    kubectl("label", "deployment/chat-gateway", "team=search")
    await run(cluster, namespace, rules)
    assert kubectl("get", "deployment/chat-engine-fast", "-o", "jsonpath={.spec.replicas}") == "2"
    assert kubectl("get", "deployment/chat-gateway", "-o", "jsonpath={.metadata.labels.team}") == "search"
    kubectl("get", "service/chat-gateway")


RENAMED = operator_doubles.pool(nodePools=[{"name": "fast", "replicas": 2}, {"name": "new"}])


async def engines_of(cluster, namespace, kind="Deployment"):
    found = [child for child in await cluster.children(namespace, "chat") if child["kind"] == kind]
    return {child["metadata"]["name"] for child in found if "-engine-" in child["metadata"]["name"]}


async def known_to_gateways(cluster, namespace):
    """The node pools in the settings of the gateways."""
    found = await cluster.get(objects.Reference(kind=objects.CONFIG_MAPS, namespace=namespace, name="chat-gateway"))
    return {item["nodePool"] for item in yaml.safe_load(found["data"]["gateway.yaml"])["services"]}


def wait_until_settled(kubectl):
    for name in kubectl("get", "deployments", "-o", "name").split():
        kubectl("rollout", "status", name, "--timeout=120s")


async def run_until_settled(cluster, kubectl, namespace, rules):
    """The second reconcile records that the engines served, and the third has no more to do."""
    for _ in range(3):
        wait_until_settled(kubectl)
        assert await run(cluster, namespace, rules) is reconcile.Result.SETTLED


async def test_a_renamed_node_pool_serves_until_its_successor_serves(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    wait_until_settled(kubectl)
    kubectl("replace", "-f", "-", body=RENAMED)
    await run(cluster, namespace, rules)
    assert await engines_of(cluster, namespace) == {"chat-engine-fast", "chat-engine-slow", "chat-engine-new"}
    progress = conditions(await cluster.pool(namespace, "chat"))["Progressing"]
    assert "chat-engine-slow stays until the others are ready" in progress["message"]
    assert await known_to_gateways(cluster, namespace) == {"fast", "slow"}
    await run_until_settled(cluster, kubectl, namespace, rules)
    assert await known_to_gateways(cluster, namespace) == {"fast", "new"}
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        assert await engines_of(cluster, namespace, kind) == {"chat-engine-fast", "chat-engine-new"}
    pool = await cluster.pool(namespace, "chat")
    assert [item["name"] for item in pool["status"]["nodePools"]] == ["fast", "new"]
    assert conditions(pool)["Ready"]["status"] == "True"


async def test_a_pool_whose_gateways_a_quota_refuses_is_not_available(cluster, kubectl, namespace, rules, eventually):
    kubectl("create", "quota", "full", "--hard=count/deployments.apps=1")
    eventually(lambda: kubectl("get", "quota/full", "-o", "jsonpath={.status.used}"))
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "fast", "replicas": 1}]))
    await run(cluster, namespace, rules)
    kubectl("rollout", "status", "deployment/chat-engine-fast", "--timeout=120s")
    kubectl("rollout", "status", "statefulset/chat-valkey", "--timeout=120s")
    await run(cluster, namespace, rules)
    found = conditions(await cluster.pool(namespace, "chat"))
    assert "exceeded quota" in found["Degraded"]["message"]
    assert (found["Available"]["status"], found["Available"]["message"]) == ("False", "No gateway is ready.")


async def test_an_edit_for_whose_engine_a_quota_has_no_room_replaces_one_after_the_other(
    cluster, kubectl, namespace, rules, eventually
):
    def pool(image):
        return operator_doubles.pool(
            engine={"kind": "sim", "image": image}, nodePools=[{"name": "fast", "replicas": 2}], gateway={"replicas": 1}
        )

    kubectl("create", "-f", "-", body=pool("v1"))
    await run(cluster, namespace, rules)
    await run_until_settled(cluster, kubectl, namespace, rules)
    kubectl("create", "quota", "full", "--hard=pods=4")
    eventually(lambda: kubectl("get", "quota/full", "-o", "jsonpath={.status.used.pods}") == "4")
    kubectl("replace", "-f", "-", body=pool("v2"))
    async with asyncio.timeout(120):
        while True:
            await run(cluster, namespace, rules)
            engines = json.loads(kubectl("get", "deployment/chat-engine-fast", "-o", "json"))
            assert engines["spec"]["template"]["spec"]["containers"][0]["image"] == "v2"
            assert engines["status"].get("readyReplicas", 0) >= 1
            if pool_status.Workload.of(engines).settled:
                break
            await asyncio.sleep(0.2)
    await run(cluster, namespace, rules)
    assert conditions(await cluster.pool(namespace, "chat"))["Degraded"]["status"] == "False"


async def test_a_node_pool_whose_successor_is_rejected_is_not_deleted(cluster, kubectl, namespace, rules, eventually):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    wait_until_settled(kubectl)
    kubectl("create", "quota", "full", "--hard=count/deployments.apps=3")
    eventually(lambda: kubectl("get", "quota/full", "-o", "jsonpath={.status.used}"))
    kubectl("replace", "-f", "-", body=RENAMED)
    for _ in range(2):  # once more with everything else settled
        assert await run(cluster, namespace, rules) is reconcile.Result.REJECTED
        wait_until_settled(kubectl)
        for kind in ("Deployment", "Service", "PodDisruptionBudget"):
            assert await engines_of(cluster, namespace, kind) >= {"chat-engine-fast", "chat-engine-slow"}
    assert "exceeded quota" in conditions(await cluster.pool(namespace, "chat"))["Degraded"]["message"]
    kubectl("delete", "quota/full")
    await run(cluster, namespace, rules)
    await run_until_settled(cluster, kubectl, namespace, rules)
    assert await engines_of(cluster, namespace) == {"chat-engine-fast", "chat-engine-new"}


async def test_a_field_that_the_spec_no_longer_has_is_withdrawn(cluster, kubectl, namespace, rules):
    kubectl(
        "create",
        "-f",
        "-",
        body=operator_doubles.pool(engine={"kind": "sim", "priorityClassName": "system-node-critical"}),
    )
    await run(cluster, namespace, rules)
    kubectl("replace", "-f", "-", body=operator_doubles.pool())

    def classes():
        found = json.loads(kubectl("get", "deployments", "-l", "tidegate.dev/node-pool", "-o", "json"))["items"]
        return [item["spec"]["template"]["spec"].get("priorityClassName") for item in found]

    assert classes() == ["system-node-critical"] * 2
    async with asyncio.timeout(120):
        while any(classes()):  # node pools change one after the other, once the engines of all others serve
            await run(cluster, namespace, rules)
            await asyncio.sleep(0.2)


async def test_an_invalid_spec_is_reported_and_the_pool_keeps_running(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    before = identities(
        await cluster.children(namespace, "chat"), owned_by=(await cluster.pool(namespace, "chat"))["metadata"]["uid"]
    )
    circle = [{"name": "w", "stages": [{"name": "a", "after": ["b"]}, {"name": "b", "after": ["a"]}]}]
    kubectl("replace", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "other"}], workflows=circle))
    await run(cluster, namespace, rules)
    pool = await cluster.pool(namespace, "chat")
    assert identities(await cluster.children(namespace, "chat"), owned_by=pool["metadata"]["uid"]) == before
    degraded = conditions(pool)["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "spec.workflows[w].stages: stages wait for each other" in degraded["message"]
    assert conditions(pool)["Ready"]["status"] == "False"
    assert conditions(pool)["CallersAuthenticated"]["status"] == "Unknown"
    assert degraded["observedGeneration"] == pool["metadata"]["generation"]
    assert "InvalidSpec" in kubectl("events", "--for", "servingpool/chat")


async def test_a_pool_without_authentication_says_so_once_in_a_warning(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    for _ in range(3):
        await run(cluster, namespace, rules)
    found = conditions(await cluster.pool(namespace, "chat"))["CallersAuthenticated"]
    assert (found["status"], found["reason"]) == ("False", "Unauthenticated")
    events = json.loads(kubectl("get", "events", "-o", "json"))["items"]
    assert [item["type"] for item in events if item["reason"] == "Unauthenticated"] == ["Warning"]
    assert "spec.gateway.auth has neither keysSecretRef nor jwt" in found["message"]
    keys = {"auth": {"keysSecretRef": {"name": "clients"}}}
    kubectl("replace", "-f", "-", body=operator_doubles.pool(gateway=keys))
    await run(cluster, namespace, rules)
    assert conditions(await cluster.pool(namespace, "chat"))["CallersAuthenticated"]["status"] == "True"


async def test_an_unknown_dispatch_rule_and_a_bad_policy_parameter_are_reported(cluster, kubectl, namespace, rules):
    parameter = {"policy": "two-lane", "name": "fast_share", "value": "2"}
    body = operator_doubles.pool(policy={"parameters": [parameter]}, gateway={"dispatch": {"rule": "magic"}})
    kubectl("create", "-f", "-", body=body)
    await run(cluster, namespace, rules)
    degraded = conditions(await cluster.pool(namespace, "chat"))["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert "spec.gateway.dispatch.rule: there is no dispatch rule 'magic'" in degraded["message"]
    assert "spec.policy.parameters[two-lane.fast_share]: parameter 'fast_share'" in degraded["message"]


async def test_an_object_of_another_owner_is_not_touched_and_is_reported(cluster, kubectl, namespace, rules):
    kubectl("create", "configmap", "chat-gateway", "--from-literal=mine=yes")
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    assert await run(cluster, namespace, rules) is reconcile.Result.REJECTED
    assert kubectl("get", "configmap/chat-gateway", "-o", "jsonpath={.data}") == '{"mine":"yes"}'
    degraded = conditions(await cluster.pool(namespace, "chat"))["Degraded"]
    assert (degraded["reason"], degraded["message"]) == (
        "NameTaken",
        "ConfigMap chat-gateway exists and belongs to another owner",
    )
    kubectl("delete", "configmap/chat-gateway")
    assert await run(cluster, namespace, rules) is reconcile.Result.SETTLED


async def test_objects_of_another_owner_are_not_touched_whatever_their_kind(cluster, kubectl, namespace, rules):
    """Another owner has an object of each kind and name that the pool needs."""
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    pool = spec.parse(await cluster.pool(namespace, "chat"), rules.known)
    desired = render.manifests(
        pool, replica_allocation.desired(pool), images=rules.images, operator_namespace="tidegate-system"
    )
    references = [objects.Reference.of(manifest) for manifest in desired]
    assert {reference.kind for reference in references} == {*objects.CHILD_KINDS}
    for manifest in desired:
        metadata = {name: manifest["metadata"][name] for name in ("name", "namespace")}
        await cluster.apply({**manifest, "metadata": metadata})
    assert await run(cluster, namespace, rules) is reconcile.Result.REJECTED
    for reference in references:
        metadata = (await cluster.get(reference))["metadata"]
        assert not metadata.keys() & {"labels", "ownerReferences"}, reference
    message = conditions(await cluster.pool(namespace, "chat"))["Degraded"]["message"]
    assert message == "; ".join(f"{reference} exists and belongs to another owner" for reference in references)


async def test_a_copy_of_an_engine_deployment_has_no_part_in_the_pool(cluster, kubectl, namespace, rules):
    node_pools = [{"name": "fast", "replicas": 2, "scaledBy": "external"}]
    kubectl("create", "-f", "-", body=operator_doubles.pool(nodePools=node_pools))
    await run(cluster, namespace, rules)
    made = json.loads(kubectl("get", "deployment/chat-engine-fast", "-o", "json"))
    for name, labels in (("copied", made["metadata"]["labels"]), ("foreign", {"tidegate.dev/pool": "chat"})):
        metadata = {"name": name, "labels": labels}
        kubectl("create", "-f", "-", body={**made, "metadata": metadata, "spec": {**made["spec"], "replicas": 0}})
    assert await run(cluster, namespace, rules) is reconcile.Result.SETTLED
    assert kubectl("get", "deployment/chat-engine-fast", "-o", "jsonpath={.spec.replicas}") == "2"
    assert kubectl("get", "deployment/copied", "-o", "jsonpath={.spec.replicas}") == "0"


async def test_an_object_that_has_lost_the_pools_label_gets_it_back(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool())
    await run(cluster, namespace, rules)
    kubectl("label", "configmap/chat-gateway", "tidegate.dev/pool-")
    await run(cluster, namespace, rules)
    assert kubectl("get", "configmap/chat-gateway", "-o", r"jsonpath={.metadata.labels.tidegate\.dev/pool}") == "chat"


async def test_a_rejection_is_reported_in_the_api_servers_words_and_the_other_objects_are_built(
    cluster, kubectl, namespace, rules
):
    broken = {"kind": "sim", "nodeSelector": {"bad key!": "x"}}
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine=broken))
    assert await run(cluster, namespace, rules) is reconcile.Result.REJECTED
    degraded = conditions(await cluster.pool(namespace, "chat"))["Degraded"]
    assert degraded["reason"] == "Refused"
    assert 'Invalid value: "bad key!": ' in degraded["message"]
    kubectl("get", "deployment/chat-gateway")


async def test_pods_that_the_namespace_forbids_make_the_pool_degraded(cluster, kubectl, namespace, rules):
    root = {"kind": "sim", "volumes": [{"name": "host", "hostPath": {"path": "/"}}]}
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine=root))
    await run(cluster, namespace, rules)
    kubectl("wait", "deployment/chat-engine-fast", "--for=condition=ReplicaFailure", "--timeout=120s")
    await run(cluster, namespace, rules)
    degraded = conditions(await cluster.pool(namespace, "chat"))["Degraded"]
    assert degraded["reason"] == "Stuck"
    assert "violates PodSecurity" in degraded["message"]


async def test_a_deleted_pool_needs_nothing(cluster, namespace, rules):
    assert await run(cluster, namespace, rules) is reconcile.Result.GONE


async def test_an_operator_killed_between_any_two_writes_leaves_no_child_missing_or_duplicated(
    cluster, kubectl, namespace, rules
):
    """Creation and an edit that adds, changes and removes children, each cut short at every write."""
    no_engines = [{"name": "fast", "replicas": 0}, {"name": "new", "replicas": 0}]  # so "slow" may go at once
    edited = {"nodePools": no_engines, "tenants": [{"name": "t"}]}
    kubectl("create", "-f", "-", body=operator_doubles.pool("whole"))
    creating = await writes_of_a_whole_run(cluster, namespace, rules, "whole")
    born = await names_after(cluster, namespace, "whole")
    kubectl("replace", "-f", "-", body=operator_doubles.pool("whole", **edited))
    editing = await writes_of_a_whole_run(cluster, namespace, rules, "whole")
    changed = await names_after(cluster, namespace, "whole")
    assert (creating, editing) == (24, 12)  # the Secret and an event are among the first

    for after in range(creating):
        name = f"born-{after}"
        kubectl("create", "-f", "-", body=operator_doubles.pool(name))
        await die_and_recover(cluster, namespace, rules, name, after)
        assert await names_after(cluster, namespace, name) == born
    for after in range(editing):
        name = f"born-{after}"
        kubectl("replace", "-f", "-", body=operator_doubles.pool(name, **edited))
        await die_and_recover(cluster, namespace, rules, name, after)
        assert await names_after(cluster, namespace, name) == changed


async def writes_of_a_whole_run(cluster, namespace, rules, name):
    counting = operator_doubles.MortalCluster(cluster, after=1000)
    await run(counting, namespace, rules, name)
    return counting.writes


async def die_and_recover(cluster, namespace, rules, name, after):
    with pytest.raises(operator_doubles.Died):
        await run(operator_doubles.MortalCluster(cluster, after=after), namespace, rules, name)
    assert await run(cluster, namespace, rules, name) is reconcile.Result.SETTLED


async def names_after(cluster, namespace, name):
    uid = (await cluster.pool(namespace, name))["metadata"]["uid"]
    found = identities(await cluster.children(namespace, name), owned_by=uid)
    return [(kind, child.replace(name, "NAME")) for kind, child in found]


MISTAKES = {
    "an unknown field": {"volumes": [{"name": "a", "emptydir": {}}]},
    "a word for a number": {"volumes": [{"name": "a", "secret": {"secretName": "b", "defaultMode": "read"}}]},
    "an unknown source": {"env": [{"name": "A", "valueFrom": {"secretRef": {"name": "x"}}}]},
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_an_object_that_the_api_server_cannot_type_is_reported_and_the_others_are_built(
    cluster, kubectl, namespace, rules, mistake
):
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine={"kind": "sim", **MISTAKES[mistake]}))
    assert await run(cluster, namespace, rules) is reconcile.Result.REJECTED
    degraded = conditions(await cluster.pool(namespace, "chat"))["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "Refused")
    assert "Deployment chat-engine-fast: " in degraded["message"]
    kubectl("get", "deployment/chat-gateway")


async def test_a_spec_may_replace_the_defaults_of_every_pod(cluster, kubectl, namespace, rules):
    engine = {
        "kind": "sim",
        "env": [{"name": "HOME", "value": "/cache"}],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}}, {"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/tmp"}],
    }
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine=engine))
    assert await run(cluster, namespace, rules) is reconcile.Result.SETTLED
    pod = json.loads(kubectl("get", "deployment/chat-engine-fast", "-o", "jsonpath={.spec.template.spec}"))
    (container,) = pod["containers"]
    assert {item["name"]: item.get("value") for item in container["env"]}["HOME"] == "/cache"
    assert [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]] == [("cache", "/tmp")]
    assert pod["volumes"][0]["emptyDir"] == {"sizeLimit": "9Gi"}


QUANTITIES = {
    "kind": "sim",
    "resources": {
        "requests": {"cpu": "1000m", "memory": "2048Mi"},
        "limits": {"cpu": "0.0015k", "memory": "4096Mi"},
    },
    "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1024Mi"}}],
}


async def test_quantities_that_the_api_server_rewrites_cause_no_further_write(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine=QUANTITIES))
    await run(cluster, namespace, rules)
    await run_until_settled(cluster, kubectl, namespace, rules)
    watchful = operator_doubles.MortalCluster(cluster, after=0)
    await run(watchful, namespace, rules)  # any write would be its death


async def test_a_quantity_that_is_written_differently_restarts_no_engine(cluster, kubectl, namespace, rules):
    kubectl("create", "-f", "-", body=operator_doubles.pool(engine=QUANTITIES))
    await run(cluster, namespace, rules)
    await run_until_settled(cluster, kubectl, namespace, rules)

    def template():
        return kubectl("get", "deployment/chat-engine-fast", "-o", "jsonpath={.spec.template}")

    before = template()
    patch = {"spec": {"engine": {"resources": {"requests": {"cpu": "1", "memory": "2Gi"}}}}}
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps(patch))
    await run(cluster, namespace, rules)
    assert template() == before
