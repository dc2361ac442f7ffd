import datetime
import math

import pytest
import yaml

from tidegate_operator import pod_trouble, pool_status

from . import test_render


def deployment(name="chat-engine-a", *, desired=2, ready=2, updated=2, existing=2, generation=1, seen=1, conditions=()):
    labels = {"app.kubernetes.io/component": "engine", "tidegate.dev/node-pool": name.rpartition("-")[2]}
    return {
        "kind": "Deployment",
        "metadata": {"name": name, "generation": generation, "labels": labels},
        "spec": {"replicas": desired},
        "status": {
            "observedGeneration": seen, "replicas": existing, "readyReplicas": ready, "updatedReplicas": updated,
            "conditions": list(conditions),
        },
    }  # fmt: skip


NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def needs(*components, autoscaled=False, store=None, **more):
    return pool_status.Needs(components=components or ("engine",), autoscaled=autoscaled, store=store or {}, **more)


def stated(children, problems=(), pods=(), *, needed=None, **more):
    parts = pool_status.workloads(children)
    stated = pool_status.conditions(parts, problems, pods, needs=needed or needs(), now=NOW, **more)
    return {item.type: (item.status, item.reason) for item in stated}


def test_a_settled_pool_is_ready():
    assert stated([deployment()]) == {
        "Available": (True, "Serving"),
        "Ready": (True, "Ready"), "Progressing": (False, "Settled"), "Degraded": (False, "AsExpected")
    }  # fmt: skip


def test_a_pool_scaled_to_zero_is_ready():
    empty = deployment(desired=0, ready=0, updated=0, existing=0)
    del empty["status"]["readyReplicas"]
    assert stated([empty])["Ready"] == (True, "Ready")


def test_a_pool_at_zero_is_available_only_if_its_autoscaler_starts_an_engine_for_the_first_call():
    empty = deployment(desired=0, ready=0, updated=0, existing=0)
    assert stated([empty])["Available"] == (False, "NotServing")
    needed = needs(autoscaled=True)
    assert stated([empty], needed=needed)["Available"] == (True, "ScaledToZero")
    assert stated([deployment(desired=1, ready=0)], needed=needed)["Available"] == (False, "NotServing")
    full = needs(autoscaled=True, autoscaling=pool_status.UNSCHEDULABLE)
    (told, *_) = pool_status.conditions(pool_status.workloads([empty]), [], needs=full, now=NOW)
    assert "may wait in vain" in told.message
    for reason in pool_status.DECIDES_NOTHING:
        needed = needs(autoscaled=True, autoscaling=reason)
        assert stated([empty], needed=needed)["Available"] == (False, "NotServing"), "no call starts an engine"
    gateway = part("gateway")
    needed = needs("engine", "gateway", autoscaled=True)
    assert stated([gateway], needed=needed)["Available"] == (False, "NotServing"), "its engines do not exist"


@pytest.mark.parametrize("before", ["ScaledToZero", "Starting", "NotStarting"])
def test_a_pool_that_its_autoscaler_wakes_is_available_while_its_first_engine_starts(before):
    woken = deployment(desired=1, ready=0, existing=1, updated=1)

    def found(*children, pods=(), reason=before, autoscaled=True):
        needed = needs("engine", "gateway", autoscaled=autoscaled, available=reason)
        return stated(children, pods=pods, needed=needed)["Available"]

    gateway = part("gateway")
    assert found(woken, gateway) == (True, "Starting")
    assert found(deployment(desired=1, ready=1), gateway) == (True, "Serving")
    assert found(deployment(desired=0, ready=0), gateway) == (True, "ScaledToZero")
    assert found(woken, gateway, reason="Serving") == (False, "NotServing"), "its engine was lost"
    assert found(woken, gateway, reason="NotServing") == (False, "NotServing")
    assert found(woken, gateway, autoscaled=False) == (False, "NotServing")
    assert found(woken, part("gateway", ready=0)) == (False, "NotServing")

    without_room = pod()
    without_room["metadata"]["labels"] = woken["metadata"]["labels"]
    assert found(woken, gateway, pods=[without_room]) == (False, "NotStarting")
    other = deployment("chat-engine-b", desired=1, ready=0)
    assert found(woken, other, gateway, pods=[without_room]) == (True, "Starting"), "the other one has room"
    late = {"type": "Progressing", "status": "False", "message": "deadline exceeded"}
    assert found({**woken, "status": {**woken["status"], "conditions": [late]}}, gateway) == (False, "NotStarting")


def test_the_needs_of_a_pool_have_the_reason_why_it_was_available():
    assert pool_status.Needs.of(body(conditions=[{"type": "Available", "reason": "Starting"}])).available == "Starting"
    assert pool_status.Needs.of(body()).available == ""


def test_a_pool_with_starting_engines_is_progressing_and_not_ready():
    assert stated([deployment(ready=1)])["Ready"] == (False, "Waiting")
    assert stated([deployment(ready=1)])["Progressing"] == (True, "RollingOut")


def test_an_edit_that_no_controller_has_seen_yet_is_not_ready():
    assert stated([deployment(generation=2, seen=1)])["Ready"] == (False, "Waiting")


def test_a_pool_with_old_pods_is_progressing():
    assert stated([deployment(existing=3)])["Progressing"] == (True, "RollingOut")
    assert stated([deployment(updated=1)])["Progressing"] == (True, "RollingOut")


def test_a_stuck_roll_out_is_degraded():
    stuck = {"type": "Progressing", "status": "False", "message": "deadline exceeded"}
    assert stated([deployment(ready=1, conditions=[stuck])])["Degraded"] == (True, "Stuck")


def test_an_invalid_spec_is_degraded_and_not_ready_even_while_every_part_runs():
    assert stated([deployment()], [("InvalidSpec", "spec.x: no")]) == {
        "Available": (True, "Serving"),
        "Ready": (False, "InvalidSpec"), "Progressing": (False, "Settled"), "Degraded": (True, "InvalidSpec")
    }  # fmt: skip


def test_the_instant_of_a_condition_moves_only_with_its_status():
    def at(now, ready, before):
        return pool_status.timed(
            [pool_status.Condition(type="Ready", status=ready, reason="R", message="m")], before, generation=1, now=now
        )

    first = at("t1", False, [])
    second = at("t2", False, first)
    third = at("t3", True, second)
    assert [item["lastTransitionTime"] for (item,) in (first, second, third)] == ["t1", "t1", "t3"]


def test_the_counts_include_engines_only():
    parts = pool_status.workloads([deployment("chat-engine-b", ready=1), deployment("chat-engine-a")])
    metadata = {"name": "chat", "namespace": "prod", "generation": 4}
    body = {
        "metadata": metadata,
        "spec": {"model": {"name": "demo"}, "nodePools": [], "gateway": {"tls": {"secretName": "cert"}}},
    }
    stated = pool_status.of_reconcile(body, parts, [])
    assert stated["engines"] == "3/4"
    assert (stated["model"], stated["gateways"]) == ("demo", "0/0")
    assert stated["url"] == "https://chat-gateway.prod.svc:8000/v1"
    assert stated["replicas"] == 4
    assert [item["name"] for item in stated["nodePools"]] == ["a", "b"]
    assert stated["selector"] == "tidegate.dev/pool=chat,app.kubernetes.io/component=engine"


def test_replicas_counts_the_engines_that_spec_replicas_sets():
    parts = pool_status.workloads([deployment("chat-engine-a"), deployment("chat-engine-b", existing=3)])

    def found(**scaled_by):
        node_pools = [{"name": name, "scaledBy": how} for name, how in scaled_by.items()]
        body = {"metadata": {"name": "chat", "namespace": "x", "generation": 1},
                "spec": {"model": {"name": "m"}, "nodePools": node_pools}}  # fmt: skip
        status = pool_status.of_reconcile(body, parts, [])
        return status["replicas"], status["selector"].partition("component=")[2]

    assert found(a="pool", b="pool") == (5, "engine")
    assert found(a="pool", b="autoscaler") == (2, "engine,tidegate.dev/node-pool in (a)")
    assert found(a="external", b="pool") == (3, "engine,tidegate.dev/node-pool in (b)")


def test_the_same_statement_is_no_change_whatever_the_other_writer_adds():
    ours = {
        "engines": "1/1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodePools": [{"name": "a", "ready": 1}],
    }
    theirs = {"activePolicy": {"name": "edf"}, "conditions": [{"type": "PolicyStable", "status": "True"}]}
    both = {**ours, **theirs, "conditions": ours["conditions"] + theirs["conditions"]}
    both["nodePools"] = [{"name": "a", "ready": 1, "sloAttainment": 0.5}]
    assert not pool_status.changed(both, ours, owns=["ready"])
    assert pool_status.changed(both, {**ours, "engines": "0/1"}, owns=["ready"])
    assert pool_status.changed(both, {**ours, "nodePools": []}, owns=["ready"])


@pytest.mark.parametrize("measured", [[], [{"name": "a", "sloAttainment": 0.5}]])
def test_entries_that_only_the_other_writer_states_are_no_change(measured):
    counted = [{"name": "a", "ready": 1}, {"name": "b", "ready": 1}]
    both = [{**counted[0], **(measured[0] if measured else {})}, counted[1]]
    assert not pool_status.changed({"nodePools": both}, {"nodePools": measured}, owns=["sloAttainment"])
    assert not pool_status.changed({"nodePools": both}, {"nodePools": counted}, owns=["ready"])
    assert not pool_status.changed({"nodePools": measured}, {"nodePools": []}, owns=["ready"])


@pytest.mark.parametrize(
    "fewer", [{"alpha": None}, {"steering": {"active": "edf"}}, {"nodePools": []}, {"nodePools": [{"name": "a"}]}]
)
def test_a_field_that_a_writer_no_longer_states_is_a_change(fewer):
    before = {"alpha": 0.2, "steering": {"active": "edf", "ends_at_s": 9.0}, "nodePools": [{"name": "a", "alpha": 0.5}]}
    stated = {key: value for key, value in {**before, **fewer}.items() if value is not None}
    assert not pool_status.changed(before, before, owns=["alpha"])
    assert pool_status.changed(before, stated, owns=["alpha"])


def test_the_same_event_at_the_same_instant_is_the_same_object():
    def event(at):
        made = pool_status.Event(namespace="n", pool="chat", uid="u", reason="R", message="m", at=at)
        return made.manifest(controller="c", instance="i")["metadata"]["name"]

    assert event("t1") == event("t1")
    assert event("t1") != event("t2")


def pod(
    name="chat-engine-a-x",
    *,
    since="2026-01-02T03:03:00Z",
    said="0/3 nodes are available: 3 Insufficient cpu.",
    **status,
):
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    return {
        "metadata": {"name": name, "creationTimestamp": since, "labels": {}},
        "status": status or {"conditions": [{**unscheduled, "lastTransitionTime": since}]},
    }


def waiting(why, message="", restarts=0, **last):
    state = {"state": {"waiting": {"reason": why, "message": message}}, "restartCount": restarts}
    return {"containerStatuses": [{**state, "lastState": {"terminated": last} if last else {}}]}


def test_the_schedulers_sentence_is_the_pools_sentence():
    def condition(which, pods):
        parts = pool_status.workloads([deployment(ready=1)])
        found = pool_status.conditions(parts, [], pods, needs=needs(), now=NOW)
        return next(item for item in found if item.type == which)

    degraded = condition("Degraded", [pod()])
    assert (degraded.status, degraded.reason) == (True, "PodsNotStarting")
    assert degraded.message == "chat-engine-a-x: Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."
    young = [pod(since="2026-01-02T03:04:00Z")]
    assert not condition("Degraded", young).status
    assert "3 Insufficient cpu" in condition("Progressing", young).message


@pytest.mark.parametrize(
    ("status", "sentence", "final_after_s"),
    [
        (waiting("ImagePullBackOff", "not found"), "x: ImagePullBackOff: not found", 60),
        (waiting("CreateContainerConfigError", "no such secret"), "x: CreateContainerConfigError: no such secret", 60),
        (waiting("InvalidImageName", "no name"), "x: InvalidImageName: no name", 0),
        (
            waiting("CrashLoopBackOff", "back-off 10s", restarts=1, reason="Error", exitCode=1),
            "x: CrashLoopBackOff: back-off 10s; Error exit code 1",
            math.inf,
        ),
        (
            waiting("CrashLoopBackOff", restarts=5, reason="OOMKilled", exitCode=137),
            "x: CrashLoopBackOff: OOMKilled exit code 137",
            0,
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "x: Evicted: low on disk", math.inf),
    ],
)
def test_the_kubelets_sentence_tells_why_a_pod_does_not_run(status, sentence, final_after_s):
    found = pod_trouble.of(pod("x", **status))
    assert found is not None
    assert (found.sentence, found.final_after_s) == (sentence, final_after_s)


def step(name, status, since):
    return {"type": name, "status": status, "lastTransitionTime": since}


def test_a_container_waits_since_the_step_before_it_in_the_start_of_its_pod():
    late, early = "2026-01-02T03:03:30Z", "2026-01-02T03:03:05Z"
    steps = [step("PodReadyToStartContainers", "True", early), step("Initialized", "True", late)]
    assert pod_trouble.of(pod(**waiting("ImagePullBackOff"), conditions=steps)).since == late
    steps = [step("PodReadyToStartContainers", "True", early), step("Initialized", "False", late)]
    assert pod_trouble.of(pod(**waiting("ImagePullBackOff"), conditions=steps)).since == early
    assert pod_trouble.of(pod(**waiting("ImagePullBackOff"))).since == "2026-01-02T03:03:00Z", "it was created then"


def test_one_crash_of_an_old_pod_is_usual_for_a_while():
    def degraded(ended_at, **more):
        ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": ended_at}
        crashed = pod(since="2025-12-30T00:00:00Z", **waiting("CrashLoopBackOff", **more, **ended))
        return stated([deployment(ready=1)], pods=[crashed])["Degraded"]

    assert degraded("2026-01-02T03:04:00Z") == (False, "AsExpected")
    assert degraded("2026-01-02T03:03:50Z") == (True, "PodsNotStarting")
    often = {"restarts": pod_trouble.CRASHES}
    assert degraded("2026-01-02T03:04:00Z", **often) == (True, "PodsNotStarting"), "it crashes again and again"


@pytest.mark.parametrize(
    ("sandbox", "since", "is_told"),
    [
        ("False", "2026-01-02T03:02:00Z", True),
        ("False", "2026-01-02T03:03:00Z", False),
        ("True", "2026-01-02T03:02:00Z", False),  # an image is pulled, or an init container downloads
    ],
)
def test_volumes_that_cannot_be_mounted_are_told_after_two_minutes(sandbox, since, is_told):
    conditions = [step("PodScheduled", "True", since), step("PodReadyToStartContainers", sandbox, since)]
    creating = pod(**waiting("ContainerCreating"), conditions=conditions)
    parts = pool_status.workloads([deployment(ready=1)])
    found = {item.type: item for item in pool_status.conditions(parts, [], [creating], needs=needs(), now=NOW)}
    sentence = "chat-engine-a-x: ContainerCreating: its volumes or network are not ready"
    assert (found["Degraded"].status, sentence in found["Degraded"].message) == (is_told, is_told)
    assert (sentence in found["Progressing"].message) == is_told
    trouble = pod_trouble.of(creating)
    assert trouble is None or trouble.final_after_s == math.inf


def test_a_pod_that_failed_is_no_trouble_of_a_workload_that_has_all_it_wants():
    evicted = pod(phase="Failed", reason="Evicted", message="low on disk")
    evicted["metadata"]["labels"] = deployment()["metadata"]["labels"]
    assert stated([deployment()], pods=[evicted])["Degraded"] == (False, "AsExpected")
    assert stated([deployment(ready=1)], pods=[evicted])["Degraded"] == (True, "PodsNotStarting")


def test_a_starting_or_leaving_pod_is_no_trouble():
    assert pod_trouble.of(pod(**waiting("ContainerCreating"))) is None
    leaving = pod()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:00Z"
    assert pod_trouble.of(leaving) is None


def part(component, **more):
    """A workload of a component that has no node pools."""
    made = deployment(f"chat-{component}", **more)
    made["metadata"]["labels"] = {"app.kubernetes.io/component": component}
    return made


def body(*, valkey=None, node_pool=None, conditions=()):
    spec = {"nodePools": [node_pool or {"name": "a"}], "state": {"valkey": valkey or {"embedded": True}}}
    return {"spec": spec, "status": {"conditions": list(conditions)}}


def available(children, pool):
    found = pool_status.conditions(pool_status.workloads(children), [], needs=pool_status.Needs.of(pool), now=NOW)
    return next((item.status, item.message) for item in found if item.type == "Available")


def test_a_pool_is_available_only_if_each_component_that_its_spec_asks_for_is_ready():
    engine, gateway, store = deployment(), part("gateway"), part("valkey")
    assert available([engine, gateway, store], body())[0]
    assert available([engine, store], body()) == (False, "No gateway is ready.")
    assert available([engine, gateway], body()) == (False, "No valkey is ready.")
    assert available([gateway, store], body()) == (False, "No engine is ready.")
    assert available([engine], body()) == (False, "No gateway and valkey is ready.")


@pytest.mark.parametrize(
    ("mode", "traffic"),
    [("FailOpen", "sends requests to engines without a decision"), ("FailClose", "refuses the requests of clients")],
)
def test_a_pool_without_a_ready_picker_says_what_its_failure_mode_means_for_requests(mode, traffic):
    engine, gateway, store = deployment(), part("gateway", ready=0), part("valkey")
    pool = body()
    pool["spec"]["gateway"] = {"api": {"failureMode": mode}}
    is_available, message = available([engine, gateway, store], pool)
    assert not is_available
    assert message.startswith("No gateway is ready. The Gateway ")
    assert traffic in message
    assert "Progressing and Degraded say why" in message
    assert available([part("gateway"), store], pool) == (False, "No engine is ready.")
    assert available([engine, part("gateway"), store], pool)[0]


def test_a_store_that_the_operator_does_not_run_needs_no_workload_and_an_old_one_does_not_count():
    external = body(valkey={"url": "redis://elsewhere:6379/0"})
    assert available([deployment(), part("gateway")], external)[0]
    assert available([deployment(), part("gateway"), part("valkey", ready=0)], external)[0]


def store_condition(status, reason, since="2026-01-02T03:03:00Z"):
    stated = {"status": status, "reason": reason, "message": "The store is away.", "lastTransitionTime": since}
    return {"type": "StoreReachable", **stated}


@pytest.mark.parametrize(
    ("store", "is_available", "degraded"),
    [
        (store_condition("True", "Reachable"), True, (False, "AsExpected")),
        (store_condition("Unknown", "NotReported"), True, (False, "AsExpected")),
        (store_condition("False", "PartlyReachable"), True, (True, "StoreUnreachable")),
        (store_condition("False", "Unreachable"), False, (True, "StoreUnreachable")),
        (store_condition("False", "Unreachable", "2026-01-02T03:03:55Z"), False, (False, "AsExpected")),
    ],
)
def test_a_store_that_the_gateways_do_not_reach_degrades_the_pool(store, is_available, degraded):
    pool = body(valkey={"url": "redis://elsewhere:6379/0"}, conditions=[store])
    parts = pool_status.workloads([deployment(), part("gateway")])
    found = {item.type: item for item in pool_status.conditions(parts, [], needs=pool_status.Needs.of(pool), now=NOW)}
    assert found["Available"].status == is_available
    assert (found["Degraded"].status, found["Degraded"].reason) == degraded
    if not is_available:
        assert found["Available"].message == "The store is away."
    if degraded[0]:
        assert found["Degraded"].message == "The store is away."


def test_a_condition_may_be_unknown():
    unknown = pool_status.Condition(type="StoreReachable", status=None, reason="R", message="m")
    (item,) = pool_status.timed([unknown], [], generation=1, now="t")
    assert item["status"] == "Unknown"


def test_a_pool_without_a_ready_engine_is_not_available():
    assert stated([deployment(ready=0)])["Available"] == (False, "NotServing")
    assert stated([])["Available"] == (False, "NothingRuns")


KEYS = {"keysSecretRef": {"name": "clients", "key": "keys.yaml"}}
TOKENS = {"jwt": {"issuer": "https://id", "audience": "chat", "jwksUrl": "https://id/keys", "tenantClaim": "org"}}


@pytest.mark.parametrize(
    ("auth", "status", "reason"),
    [
        ({}, False, "Unauthenticated"),
        (KEYS, True, "KeysOrTokens"),
        (TOKENS, True, "KeysOrTokens"),
        (KEYS | TOKENS, True, "KeysOrTokens"),
    ],
)
def test_the_status_tells_of_gateways_that_serve_callers_without_authentication(auth, status, reason):
    pool = test_render.body()
    pool["spec"]["gateway"]["auth"] = auth
    found = pool_status.authentication(pool, valid=True)
    assert (found.type, found.status, found.reason) == ("CallersAuthenticated", status, reason)
    config = test_render.pick(test_render.manifests(gateway=pool["spec"]["gateway"]), "ConfigMap", "chat-gateway")
    settings = yaml.safe_load(config["data"]["gateway.yaml"])
    assert settings["auth"].get("allowUnauthenticated", False) is not status
    assert pool_status.authentication(pool, valid=False).status is None, "the gateways follow an earlier spec"


def test_a_pool_whose_gateways_have_told_nothing_of_the_store_does_not_claim_that_it_serves():
    parts = pool_status.workloads([deployment()])

    def told(**store):
        (available, *_) = pool_status.conditions(parts, [], needs=needs(store=store), now=NOW)
        assert (available.type, available.status, available.reason) == ("Available", True, "Serving")
        return available.message

    for unknown in ({}, {"type": "StoreReachable", "status": "Unknown", "reason": "NotReported"}):
        assert "the store serve." not in told(**unknown)
        assert "Whether the store serves is not known" in told(**unknown)
    since = {"lastTransitionTime": NOW.isoformat()}
    assert "Some gateways do not reach the store" in told(
        status="False", reason="PartlyReachable", message="x", **since
    )
    assert told(status="True", reason="Reachable") == "Engines, gateways and the store serve."
