"""Can a new engine take the place of an old one? What the scheduler counts of a pod, and what restricts its nodes."""

import pytest

from tidegate_operator import engine_place, pod_trouble


def pod(*, requests=None, limits=None, **more):
    resources = {"requests": requests or {}, "limits": limits or {}}
    return {"containers": [{"resources": resources}], **more}


GPUS = pod(requests={"memory": "64Gi"}, limits={"nvidia.com/gpu": "8", "memory": "64Gi"})


def why(new, old, **more):
    return [*engine_place.obstacles(new, old, **more)]


def test_a_pod_that_requests_the_same_or_less_of_everything_takes_the_place():
    assert why(GPUS, GPUS) == []
    assert why(pod(requests={"memory": "65536Mi"}, limits={"nvidia.com/gpu": 4}), GPUS) == []


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (pod(limits={"nvidia.com/gpu": "80"}), "its requests have 80 nvidia.com/gpu, those of an old engine 8"),
        (pod(requests={"memory": "8Ti"}), "its requests have 8Ti memory, those of an old engine 64Gi"),
        (pod(requests={"cpu": "500m"}), "its requests have 0.5 cpu, those of an old engine 0"),
        (GPUS | {"overhead": {"memory": "120Mi"}}, "its requests have 65656Mi memory, those of an old engine 64Gi"),
        (GPUS | {"nodeSelector": {"zone": "b"}}, "its nodeSelector differs"),
        (GPUS | {"affinity": {"nodeAffinity": {}}}, "its affinity differs"),
        (GPUS | {"runtimeClassName": "nvidia"}, "its runtimeClassName differs"),
        (GPUS | {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "x"}]}, "its resourceClaims differs"),
        (GPUS | {"volumes": [{"persistentVolumeClaim": {"claimName": "weights"}}]}, "its volumes differ"),
    ],
)
def test_a_pod_that_asks_for_more_does_not(new, told):
    assert why(new, GPUS) == [told]


def test_only_what_the_cluster_lacks_is_compared():
    more_memory = pod(requests={"memory": "96Gi"}, limits={"nvidia.com/gpu": "8"})
    assert why(more_memory, GPUS, lacking={"nvidia.com/gpu"}) == []
    assert why(more_memory, GPUS, lacking={"nvidia.com/gpu", "memory"}) == [
        "its requests have 96Gi memory, those of an old engine 64Gi"
    ]


def test_the_scheduler_names_what_the_cluster_lacks():
    message = "0/3 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu. preemption: no victims."
    trouble = pod_trouble.PodTrouble(pod="p", reason="Unschedulable", message=message, since="")
    assert trouble.lacks == {"memory", "nvidia.com/gpu"}


def test_a_pod_with_fewer_restrictions_takes_the_place_of_one_with_more():
    taint = {"key": "gpu", "operator": "Exists"}
    added = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}
    restricted = GPUS | {"nodeSelector": {"zone": "a"}, "affinity": {"podAffinity": {}}, "tolerations": [added]}
    assert why(GPUS | {"tolerations": [taint]}, restricted) == []
    assert why(GPUS, GPUS | {"tolerations": [taint]}) == ["its tolerations differ"]


def test_limits_count_for_a_quota_alone():
    more = pod(requests={"memory": "64Gi"}, limits={"memory": "96Gi"})
    assert why(more, GPUS) == []
    assert why(more, GPUS, limits=True) == ["its limits have 96Gi memory, those of an old engine 64Gi"]


def test_init_containers_run_before_the_others_and_those_that_go_on_beside_them():
    def container(cpu, **more):
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {"containers": [container("1"), container("500m")], "initContainers": [container("1200m")]}
    assert engine_place.amounts(spec, "requests")["cpu"] == 1.5
    spec["initContainers"] += [container("1", restartPolicy="Always"), container("3")]
    assert engine_place.amounts(spec, "requests")["cpu"] == 4
    spec["initContainers"].pop()
    assert engine_place.amounts(spec, "requests")["cpu"] == 2.5
    spec["resources"] = {"requests": {"cpu": "2"}}
    assert engine_place.amounts(spec, "requests")["cpu"] == 2


def engine(revision, *, placed=True, ready=True, **spec):
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "1 Insufficient memory",
    }
    conditions = [{"type": "Ready", "status": str(ready)}, *([] if placed else [unscheduled])]
    spec = {**pod(**spec), **({"nodeName": "node"} if placed else {})}
    notes = {"tidegate.dev/revision": revision}
    return {"metadata": {"name": revision, "annotations": notes}, "spec": spec, "status": {"conditions": conditions}}


def obstacle(*pods, rejected=None):
    return engine_place.obstacle(pods, revision="new", served="old", rejected=rejected)


def test_the_new_pod_must_fit_in_the_place_of_every_engine_that_could_stop():
    waiting = engine("new", placed=False, ready=False, requests={"memory": "2Gi"})
    large, small = engine("old", requests={"memory": "2Gi"}), engine("older", requests={"memory": "1Gi"})
    assert obstacle(waiting, large) is None
    assert obstacle(waiting, large, small) == "its requests have 2Gi memory, those of an old engine 1Gi"


def test_an_engine_of_a_revision_that_never_served_may_stop_and_one_that_served_before_may_not():
    waiting = engine("new", placed=False, ready=False, requests={"memory": "2Gi"})
    assert obstacle(waiting, engine("broken", ready=False, requests={"memory": "1Gi"})) is None
    assert obstacle(waiting, engine("old", ready=False, requests={"memory": "1Gi"})) is not None
    assert obstacle(waiting, engine("old", placed=False, ready=False, requests={"memory": "1Gi"})) is None


def test_for_a_quota_the_pods_that_it_rejects_count():
    old = engine("old", requests={"memory": "1Gi"})
    assert obstacle(old, rejected=pod(requests={"memory": "1Gi"})) is None
    assert obstacle(old, rejected=pod(requests={"memory": "2Gi"})) is not None
