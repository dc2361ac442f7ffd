"""The operator's process, under the rights of its chart, as people meet it: through kubectl."""

import itertools
import json
import pathlib
import re

import operator_doubles
from tidegate_operator import engine_room


def columns(kubectl, name="chat"):
    head, row = kubectl("get", "spool", name).splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    return {head[a:b].strip(): row[a:b].strip() for a, b in itertools.pairwise([*starts, None])}


def test_a_pool_becomes_ready_scales_changes_and_is_deleted(kubectl, operator, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert columns(kubectl)["READY"] == "True"
    assert columns(kubectl)["ENGINES"] == "3/3"
    status = json.loads(kubectl("get", "spool/chat", "-o", "json"))["status"]
    assert status["nodePools"] == [
        {"name": "fast", "desired": 2, "ready": 2},
        {"name": "slow", "desired": 1, "ready": 1},
    ]

    kubectl("scale", "spool/chat", "--replicas=5")
    eventually(lambda: columns(kubectl)["ENGINES"] == "5/5")
    scale = json.loads(
        kubectl(
            "get", "--raw", f"/apis/tidegate.dev/v1alpha1/namespaces/{namespace_of(kubectl)}/servingpools/chat/scale"
        )
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (5, 5)
    assert len(kubectl("get", "pods", "-l", scale["status"]["selector"], "-o", "name").splitlines()) == 5

    kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"tenants": [{"name": "search", "weight": 3}]}}')
    eventually(lambda: "search" in kubectl("get", "configmap/chat-gateway", "-o", "yaml"))
    kubectl("wait", "spool/chat", "--for=condition=Progressing=False", "--timeout=120s")

    kubectl("delete", "spool/chat", "--timeout=120s")
    kinds = "deployments,statefulsets,services,configmaps,poddisruptionbudgets,networkpolicies,pods,endpointslices"
    eventually(lambda: not kubectl("get", kinds, "-l", "tidegate.dev/pool=chat", "-o", "name").strip())


def namespace_of(kubectl):
    return kubectl("create", "configmap", "x", "--dry-run=server", "-o", "jsonpath={.metadata.namespace}")


def test_a_real_pool_waits_for_gpus_of_its_kind(kubectl, operator, eventually):
    """Two engines of eight GPUs fit the two simulated A100 nodes; no node is left for the third."""
    node_pools = [{"name": "a100", "accelerator": "NVIDIA-A100-SXM4-80GB", "tensorParallel": 8, "replicas": 2}]
    kubectl("apply", "-f", "-", body=operator_doubles.pool(engine={"kind": "vllm"}, nodePools=node_pools))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    nodes = kubectl("get", "pods", "-l", "tidegate.dev/node-pool=a100", "-o", "jsonpath={.items[*].spec.nodeName}")
    assert sorted(nodes.split()) == ["a100-0", "a100-1"]
    kubectl("scale", "spool/chat", "--replicas=3")
    eventually(lambda: columns(kubectl)["ENGINES"] == "2/3")
    kubectl("wait", "spool/chat", "--for=condition=Ready=False", "--timeout=120s")
    assert "chat-engine-a100 has 2 of 3 ready" in kubectl("get", "spool/chat", "-o", "jsonpath={.status.conditions}")


def ready_engines(kubectl):
    """Names of the ready engine pods."""
    pods = json.loads(kubectl("get", "pods", "-l", "app.kubernetes.io/component=engine", "-o", "json"))["items"]
    return {
        pod["metadata"]["name"]
        for pod in pods
        for item in pod["status"].get("conditions", ())
        if item["type"] == "Ready" and item["status"] == "True" and "deletionTimestamp" not in pod["metadata"]
    }


def condition(kubectl, which):
    found = json.loads(kubectl("get", "spool/chat", "-o", "json"))["status"]["conditions"]
    return next(item for item in found if item["type"] == which)


def test_a_typo_in_a_node_selector_costs_no_engine_and_the_schedulers_sentence_is_shown(kubectl, operator, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    before = ready_engines(kubectl)
    kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"engine": {"nodeSelector": {"typo": "yes"}}}}')
    eventually(lambda: condition(kubectl, "Degraded")["status"] == "True")  # `test_trouble_in_time` has the time
    degraded = condition(kubectl, "Degraded")
    assert degraded["reason"] == "PodsNotStarting"
    assert "didn't match Pod's node affinity/selector" in degraded["message"]
    eventually(lambda: "chat-engine-slow waits for its turn" in condition(kubectl, "Progressing")["message"])
    assert condition(kubectl, "Available")["status"] == "True"
    assert ready_engines(kubectl) == before
    kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"engine": {"nodeSelector": null}}}')
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert condition(kubectl, "Degraded")["status"] == "False"
    assert ready_engines(kubectl) == before


def test_a_full_cluster_replaces_one_engine_at_a_time(kubectl, operator, eventually):
    """All GPUs of the A6000 node are in use, so a new engine has no room beside the old ones."""
    node_pools = [{"name": "a6000", "accelerator": "NVIDIA-RTX-A6000", "tensorParallel": 4, "replicas": 2}]
    kubectl("apply", "-f", "-", body=operator_doubles.pool(engine={"kind": "vllm"}, nodePools=node_pools))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    before = ready_engines(kubectl)
    kubectl("patch", "spool/chat", "--type=merge", "-p", '{"spec": {"engine": {"env": [{"name": "A", "value": "b"}]}}}')

    def replaced():
        ready = ready_engines(kubectl)
        assert len(ready) >= 1
        return len(ready) == 2 and not ready & before

    eventually(replaced, timeout_s=60 + engine_room.PATIENCE_S)
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")


def test_an_edit_that_no_node_can_hold_costs_no_engine_of_a_full_cluster(kubectl, operator, eventually):
    node_pools = [{"name": "a6000", "accelerator": "NVIDIA-RTX-A6000", "tensorParallel": 4, "replicas": 2}]
    kubectl("apply", "-f", "-", body=operator_doubles.pool(engine={"kind": "vllm"}, nodePools=node_pools))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    before = ready_engines(kubectl)
    edit = {"spec": {"nodePools": [{**node_pools[0], "tensorParallel": 64}]}}
    kubectl("patch", "spool/chat", "--type=merge", "-p", json.dumps(edit))
    why = "its requests have 64 nvidia.com/gpu, those of an old engine 4"
    eventually(lambda: why in condition(kubectl, "Progressing")["message"])
    eventually(lambda: condition(kubectl, "Degraded")["reason"] == "PodsNotStarting")
    assert ready_engines(kubectl) == before
    strategy = kubectl("get", "deployment/chat-engine-a6000", "-o", "jsonpath={.spec.strategy.rollingUpdate}")
    assert json.loads(strategy) == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_scale_beyond_the_node_pools_is_rejected(kubectl, operator):
    kubectl("apply", "-f", "-", body=operator_doubles.pool(nodePools=[{"name": "a", "maxReplicas": 2}]))
    assert "more than all spec.nodePools[].maxReplicas" in kubectl("scale", "spool/chat", "--replicas=3", check=False)


def scale_of(kubectl):
    path = f"/apis/tidegate.dev/v1alpha1/namespaces/{namespace_of(kubectl)}/servingpools/chat/scale"
    return json.loads(kubectl("get", "--raw", path))


def test_a_pool_without_a_total_has_a_scale_that_follows_its_node_pools_until_it_is_scaled(
    kubectl, operator, eventually
):
    pools = [{"name": "a", "replicas": 2, "maxReplicas": 2}, {"name": "b", "replicas": 1, "maxReplicas": 4}]
    kubectl("apply", "-f", "-", body=operator_doubles.pool(nodePools=pools))
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert scale_of(kubectl)["spec"]["replicas"] == 3
    fewer = [{"name": "a", "replicas": 1, "maxReplicas": 1}, {"name": "b", "replicas": 1, "maxReplicas": 1}]
    kubectl("apply", "-f", "-", body=operator_doubles.pool(nodePools=fewer))
    eventually(lambda: scale_of(kubectl)["spec"]["replicas"] == 2)
    eventually(lambda: columns(kubectl)["ENGINES"] == "2/2")
    kubectl("scale", "spool/chat", "--replicas=1")
    eventually(lambda: columns(kubectl)["ENGINES"] == "1/1")
    assert scale_of(kubectl)["spec"]["replicas"] == 1


def test_an_autoscaler_finds_the_scale_of_the_documented_example(kubectl, operator, eventually):
    kubectl("apply", "-f", str(pathlib.Path(__file__).parent / "golden" / "chat.yaml"))
    eventually(lambda: kubectl("get", "spool/chat", "-o", "jsonpath={.spec.replicas}") == "4")
    target = {"apiVersion": "tidegate.dev/v1alpha1", "kind": "ServingPool", "name": "chat"}
    metric = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}},
    }
    autoscaler = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "chat"},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 8, "metrics": [metric]},
    }  # fmt: skip
    kubectl("create", "-f", "-", body=autoscaler)
    found = "jsonpath={.status.conditions[?(@.type=='AbleToScale')].reason}"
    eventually(lambda: kubectl("get", "hpa/chat", "-o", found) == "SucceededGetScale", timeout_s=60)


def test_a_deleted_child_is_created_again(kubectl, operator, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    kubectl("delete", "deployment/chat-gateway")
    eventually(lambda: "chat-gateway" in kubectl("get", "deployments"))


def test_changes_made_while_no_operator_ran_are_carried_out(kubectl, operator, namespace, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    operator.stop()
    kubectl("scale", "spool/chat", "--replicas=1")
    kubectl("apply", "-f", "-", body=operator_doubles.pool("second"))
    operator.start("again", namespace)
    eventually(lambda: columns(kubectl)["ENGINES"] == "1/1")
    kubectl("wait", "spool/second", "--for=condition=Ready", "--timeout=120s")


def test_a_pool_can_be_deleted_while_no_operator_runs(kubectl, operator, eventually):
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    operator.stop()
    kubectl("delete", "spool/chat", "--timeout=20s")
    eventually(lambda: not kubectl("get", "deployments", "-o", "name").strip())


def test_one_of_two_operators_acts_and_the_other_takes_over(kubectl, installed, namespace, plane, eventually):
    def holder():
        return plane.kubectl(
            "get", "lease/tidegate", "-n", installed.system, "-o", "jsonpath={.spec.holderIdentity}", check=False
        )

    installed.start("one", namespace)
    eventually(lambda: holder() == "one")
    installed.start("two", namespace)
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert holder() == "one"
    assert "holds the Lease" not in installed.said("two")
    installed.stop("one")  # a shutdown releases the Lease, so the second operator need not wait for its expiry
    eventually(lambda: holder() == "two", timeout_s=8)
    kubectl("scale", "spool/chat", "--replicas=4")
    eventually(lambda: columns(kubectl)["ENGINES"] == "4/4")
    writers = {
        event["reportingInstance"]
        for event in json.loads(kubectl("get", "events.events.k8s.io", "-o", "json"))["items"]
        if event["regarding"]["kind"] == "ServingPool"
    }
    assert writers <= {"one", "two"}


def test_a_dead_operator_is_replaced_when_its_lease_has_expired(kubectl, installed, namespace, eventually):
    installed.start("one", namespace)
    eventually(lambda: "holds the Lease" in installed.said("one"))
    installed.start("two", namespace)
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    installed.kill("one")
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    assert "holds the Lease" in installed.said("two")


def test_a_status_with_a_field_that_no_apply_can_read_is_put_right(kubectl, operator, eventually):
    """The API server takes a list in place of an instant from a merge patch; no server-side apply passes it."""
    kubectl("apply", "-f", "-", body=operator_doubles.pool())
    kubectl("wait", "spool/chat", "--for=condition=Ready", "--timeout=120s")
    lie = {"type": "Available", "status": "False", "reason": "Lie", "message": "LIE"}
    lie["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    patch = json.dumps({"status": {"activePolicy": {"since": []}, "conditions": [lie]}})
    kubectl("patch", "spool/chat", "--subresource=status", "--type=merge", "-p", patch)
    kubectl("wait", "spool/chat", "--for=condition=Available", "--timeout=60s")
    eventually(lambda: "LIE" not in kubectl("get", "spool/chat", "-o", "json"))
