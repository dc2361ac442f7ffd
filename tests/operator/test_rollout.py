"""Engines change one after the other, and a revision that does not serve is taken back. A simulated cluster carries out
what the plan says, so that whole roll-outs run."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator import rollout
from tidegate_operator.render import child_metadata

from .simulated_deployments import NO_WEIGHTS, NOW, Simulated, manifests, pool, run, staged, started


def test_a_new_pool_starts_all_its_engines_at_once():
    cluster = Simulated()
    run(cluster, pool(image="v1"), rounds=1)
    assert set(cluster.serving().values()) == {2}


def test_an_edit_reaches_one_node_pool_after_the_other_and_no_engine_is_missed():
    cluster = started()
    assert staged(cluster, pool(image="v2")).held == ("chat-engine-b", "chat-engine-c")
    _, least, settled = run(cluster, pool(image="v2"))
    assert settled
    assert set(least.values()) == {2}
    assert cluster.images() == {"v2"}


def test_a_write_that_the_deployment_controller_has_not_seen_yet_lets_no_other_node_pool_change():
    cluster = started()
    for name in cluster.generations:  # as an annotation that is written, for example that of the served revision
        cluster.generations[name] += 1
    assert staged(cluster, pool(image="v2")).held == ("chat-engine-a", "chat-engine-b", "chat-engine-c")
    cluster.step()
    assert staged(cluster, pool(image="v2")).held == ("chat-engine-b", "chat-engine-c")


def test_a_node_pool_that_does_not_serve_waits_for_no_other():
    cluster = Simulated(broken={"bad"})
    run(cluster, pool(image="bad"), rounds=5)
    assert staged(cluster, pool(image="v2")).held == ()


def test_a_node_pool_that_lost_an_engine_does_not_take_a_revision_that_failed_elsewhere():
    cluster = started()
    cluster.broken = {"bad"}
    run(cluster, pool(image="bad"))
    cluster.lose("chat-engine-b")
    found, _, _ = run(cluster, pool(image="bad"))
    assert set(found.held) == {"chat-engine-b", "chat-engine-c"}
    assert cluster.images() == {"v1"}
    cluster.lose("chat-engine-b", 2)
    assert "chat-engine-b" in staged(cluster, pool(image="bad")).held, "others serve"
    for name in ("chat-engine-a", "chat-engine-c"):
        cluster.lose(name, 2)
    assert staged(cluster, pool(image="bad")).held == (), "nothing serves, so trying it costs nothing"


def test_a_node_pool_that_lost_an_engine_does_not_change_beside_another_one():
    cluster = started()
    cluster.lose("chat-engine-b")
    cluster.lose("chat-engine-c")
    found = staged(cluster, pool(image="v2"))
    assert set(found.held) == {"chat-engine-a", "chat-engine-c"}, (
        "no other one changes, so its engine does not block it"
    )
    cluster = started()
    run(cluster, pool(image="v2"), rounds=2)
    cluster.lose("chat-engine-b")
    assert set(staged(cluster, pool(image="v2")).held) == {"chat-engine-b", "chat-engine-c"}
    cluster.lose("chat-engine-b", 2)
    assert set(staged(cluster, pool(image="v2")).held) == {"chat-engine-c"}, "it has no engine to lose"


def test_without_room_beside_the_old_engines_one_engine_at_a_time_is_replaced():
    cluster = started(spare=0)
    for _ in range(100):
        run(cluster, pool(image="v2"), rounds=1)
        assert sum(cluster.serving().values()) >= 5
    assert cluster.images() == {"v2"}


@pytest.mark.parametrize("spare", [0, 1])
def test_a_revision_that_does_not_serve_is_taken_back_and_said_so(spare):
    cluster = started(spare=spare)
    cluster.broken = {"bad"}
    found, least, settled = run(cluster, pool(image="bad"))
    assert settled
    ((reason, message),) = found.problems
    assert reason == "RolledBack"
    assert message.startswith("chat-engine-a did not serve")
    assert "no such image" in message
    assert cluster.images() == {"v1"}
    assert least == {"chat-engine-a": 1 + spare, "chat-engine-b": 2, "chat-engine-c": 2}
    assert set(found.held) == {"chat-engine-b", "chat-engine-c"}


def big(memory, **more):
    return pool(image="v2", resources={"requests": {"memory": memory}}, **more)


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (big("8Ti"), "its requests have 8Ti memory, those of an old engine 64Gi"),
        (big("64Gi", nodeSelector={"typo": "yes"}), "its nodeSelector differs"),
    ],
)
def test_an_edit_that_no_node_can_hold_costs_no_engine_and_its_deadline_takes_it_back(spare, edit, why):
    cluster = Simulated(spare=spare)
    before = big("64Gi")
    run(cluster, before, rounds=5)
    found, least, _ = run(cluster, edit)
    assert set(least.values()) == {2}
    assert found.told["chat-engine-a"].startswith("finds no room for an engine of the new revision")
    assert why in found.told["chat-engine-a"]
    cluster.late = True
    run(cluster, edit, rounds=1)
    cluster.late = False
    found, least, settled = run(cluster, edit)
    assert settled
    assert "Insufficient" in dict(found.problems)["RolledBack"]
    assert set(least.values()) == {2}
    told = "waits, because chat-engine-a did not serve with the new spec; correct the spec of that node pool first"
    assert found.told == dict.fromkeys(("chat-engine-b", "chat-engine-c"), told)


def test_where_a_quota_has_no_room_for_one_more_engine_one_at_a_time_is_replaced():
    cluster = started(quota=2)
    found, least, settled = run(cluster, pool(image="v2"))
    assert settled
    assert found.problems == ()
    assert cluster.images() == {"v2"}
    assert set(least.values()) == {1}


def test_an_engine_that_a_quota_rejects_even_in_the_place_of_an_old_one_is_taken_back_at_its_deadline():
    cluster = Simulated(quota=2)
    run(cluster, big("64Gi"), rounds=5)
    found, least, _ = run(cluster, big("128Gi"))
    assert set(least.values()) == {2}
    assert "its requests have 128Gi memory" in found.told["chat-engine-a"]
    cluster.late = True
    run(cluster, big("128Gi"), rounds=1)
    cluster.late = False
    found, least, settled = run(cluster, big("128Gi"))
    assert settled
    assert "exceeded quota" in dict(found.problems)["RolledBack"]
    assert set(least.values()) == {2}


def test_an_engine_that_was_rejected_before_the_edit_says_nothing_of_the_new_revision():
    cluster = started()
    cluster.rejected = {"chat-engine-a"}
    cluster.apply(staged(cluster, pool(image="v2")).desired)
    found = staged(cluster, pool(image="v2"))
    assert found.problems == ()
    engine = found.desired[0]
    assert engine["spec"]["strategy"] == {}
    assert engine["spec"]["template"]["spec"]["image"] == "v2"


def test_without_room_an_engine_that_asks_for_less_takes_the_place_of_an_old_one():
    cluster = Simulated(spare=0)
    run(cluster, big("64Gi"), rounds=5)
    _, least, settled = run(cluster, big("32Gi"), rounds=120)
    assert settled
    assert set(least.values()) == {1}
    assert {pod["spec"]["containers"][0]["resources"]["requests"]["memory"] for pod in cluster.listed()
            if "engine" in pod["metadata"]["name"]} == {"32Gi"}  # fmt: skip


def test_a_node_pool_of_one_engine_keeps_it_while_the_new_one_finds_no_room():
    cluster, before, edit = Simulated(spare=5), big("64Gi"), big("8Ti")
    for body in (before, edit):
        body["spec"]["nodePools"] = [{"name": "a", "replicas": 1}]
    run(cluster, before, rounds=5)
    _, least, _ = run(cluster, edit)
    assert least == {"chat-engine-a": 1}


def test_an_edit_whose_weights_cannot_be_downloaded_is_taken_back_and_no_engine_is_missed():
    cluster = started()
    cluster.broken, cluster.failure = {"bad"}, NO_WEIGHTS
    found, least, settled = run(cluster, pool(image="bad"))
    assert settled
    ((reason, message),) = found.problems
    assert reason == "RolledBack"
    assert message.endswith("WeightsNotFound: no such model: correct the URI")
    assert cluster.images() == {"v1"}
    assert set(least.values()) == {2}


def test_a_secret_that_is_applied_a_moment_after_the_edit_costs_no_edit():
    cluster = started()
    waits = {"reason": "CreateContainerConfigError", "message": "secret not found"}
    cluster.broken, cluster.failure = {"v2"}, {"containerStatuses": [{"state": {"waiting": waits}}]}
    found, _, _ = run(cluster, pool(image="v2"), rounds=3)
    assert not found.problems
    cluster.broken.clear()
    found, least, settled = run(cluster, pool(image="v2"))
    assert settled
    assert (cluster.images(), found.problems, set(least.values())) == ({"v2"}, (), {2})


def test_after_a_failed_edit_a_good_one_goes_on():
    cluster = started()
    cluster.broken = {"bad"}
    run(cluster, pool(image="bad"))
    found, least, settled = run(cluster, pool(image="v3"))
    assert settled
    assert (found.problems, found.held) == ((), ())
    assert cluster.images() == {"v3"}
    assert set(least.values()) == {2}


def test_a_failed_edit_that_is_undone_leaves_no_trace():
    cluster = started()
    cluster.broken = {"bad"}
    run(cluster, pool(image="bad"))
    found, _, settled = run(cluster, pool(image="v1"))
    assert settled
    assert (found.problems, found.held) == ((), ())
    assert not any(rollout.FAILED in item["metadata"]["annotations"] for item in cluster.observed())


def test_a_new_operator_version_restarts_nothing_until_the_spec_changes():
    cluster = started()
    pods, writes = copy.deepcopy(cluster.pods), cluster.writes
    run(cluster, pool(image="v1"), version="2")
    assert (cluster.pods, cluster.writes) == (pods, writes)
    run(cluster, pool(image="v2"), version="2")
    assert {pod["template"]["spec"]["by"] for pods in cluster.pods.values() for pod in pods} == {"2"}


@pytest.mark.parametrize("noted", [True, False])
def test_a_new_operator_version_knows_what_failed_and_tries_it_nowhere_until_the_spec_changes(noted):
    cluster = started()
    cluster.broken = {"bad"}
    before, _, _ = run(cluster, pool(image="bad"))
    if not noted:  # by an operator of an earlier version
        notes = cluster.stated["chat-engine-a"]["metadata"]["annotations"]
        failure = json.loads(notes[rollout.FAILED])
        del failure["inputs"]
        notes[rollout.FAILED] = json.dumps(failure)
    writes = cluster.writes
    found, least, settled = run(cluster, pool(image="bad"), version="2")
    assert settled
    assert (found.problems, found.held) == (before.problems, before.held)
    assert (cluster.images(), cluster.writes, set(least.values())) == ({"v1"}, writes, {2})
    cluster.broken.clear()
    again = pool(image="bad")
    again["metadata"]["annotations"][rollout.RESTART] = "today"
    found, _, _ = run(cluster, again, version="2")
    assert (found.problems, found.held, cluster.images()) == ((), (), {"bad"})


def test_a_failed_edit_that_is_undone_before_the_old_engines_are_back_is_no_failure():
    cluster = started(spare=0)
    cluster.broken = {"bad"}
    while not (found := staged(cluster, pool(image="bad"))).problems:
        cluster.apply(found.desired)
        cluster.step()
    cluster.apply(found.desired)
    notes = cluster.stated["chat-engine-a"]["metadata"]["annotations"]
    notes[rollout.FAILED] = json.dumps({"revision": "of an earlier version", "why": "no such image"})
    for _ in range(2):
        found = staged(cluster, pool(image="v1"))
        assert (found.problems, found.held) == ((), ())
        cluster.apply(found.desired)


def test_defaults_that_an_upgrade_of_the_resource_adds_to_a_stored_pool_restart_nothing():
    def stored(*, upgraded):
        body = pool(image="v1")
        body["spec"]["classes"] = [{"name": "chat", "weight": 1} | ({"objective": 95} if upgraded else {})]
        for item in body["spec"]["nodePools"] if upgraded else ():
            item["scaledBy"] = "pool"
        return body

    cluster = Simulated()
    run(cluster, stored(upgraded=False))
    pods = copy.deepcopy(cluster.pods)
    run(cluster, stored(upgraded=True), version="2")
    assert cluster.pods == pods


def test_engines_of_an_operator_without_revisions_are_not_restarted():
    cluster = Simulated()
    cluster.apply(manifests(pool(image="v1"), version="0"))
    cluster.step()
    before = copy.deepcopy(cluster.pods)
    run(cluster, pool(image="v1"))
    assert cluster.pods == before
    _, least, settled = run(cluster, pool(image="v2"))
    assert settled
    assert set(least.values()) == {2}


def test_a_new_value_of_the_restart_annotation_restarts_the_engines_one_after_the_other():
    cluster = started()
    body = pool(image="v1")
    body["metadata"]["annotations"][rollout.RESTART] = "today"
    assert len(staged(cluster, body).held) == 2
    _, least, settled = run(cluster, body)
    assert settled
    assert set(least.values()) == {2}
    engines = [pod for name, pods in cluster.pods.items() if "engine" in name for pod in pods]
    assert {pod["template"]["metadata"]["annotations"][rollout.RESTART] for pod in engines} == {"today"}


def with_store(body, *, version="1", storage=True):
    """The manifests of a pool with an embedded store."""
    body["spec"]["state"] = {"valkey": {"embedded": True, **({"storage": {"size": "1Gi"}} if storage else {})}}
    store = copy.deepcopy(manifests(body, version=version)[-1])
    store["kind"], store["metadata"]["name"] = "StatefulSet", "chat-valkey"
    store["metadata"]["labels"]["app.kubernetes.io/component"] = "valkey"
    return [store, *manifests(body, version=version)]


def by_version(cluster):
    """The versions of the operator that rendered the pods of each workload."""
    return {name: {pod["template"]["spec"].get("by") or pod["template"]["spec"]["image"]["by"] for pod in pods}
            for name, pods in cluster.pods.items()}  # fmt: skip


def test_restart_all_gives_gateways_and_then_the_store_what_a_new_operator_renders_and_the_data_stay():
    cluster, old = Simulated(), pool(image="v1")
    for body, version, rounds in ((old, "1", 5), (old, "2", 5)):
        for _ in range(rounds):
            found = rollout.staged(body, with_store(body, version=version), cluster.observed(), [], now=NOW)
            cluster.apply(found.desired)
            cluster.step()
    assert by_version(cluster)["chat-valkey"] == by_version(cluster)["chat-gateway"] == {"1"}
    body = pool(image="v1")
    body["metadata"]["annotations"][rollout.RESTART_ALL] = "today"
    seen = []
    for _ in range(60):
        found = rollout.staged(body, with_store(body, version="2"), cluster.observed(), [], now=NOW)
        cluster.apply(found.desired)
        cluster.step()
        assert min(cluster.serving().values()) == 2
        versions = by_version(cluster)
        seen.append((versions["chat-gateway"], versions["chat-valkey"], "chat-valkey" in found.held))
    assert all(gateways == {"2"} for gateways, store, _ in seen if "2" in store)
    assert any(held for _, _, held in seen)
    assert set(map(frozenset, by_version(cluster).values())) == {frozenset({"2"})}


def test_restart_all_leaves_a_store_without_a_volume_alone():
    cluster = Simulated()
    for annotations, version in (({}, "1"), ({rollout.RESTART_ALL: "today"}, "2")):
        body = pool(image="v1")
        body["metadata"]["annotations"] = annotations
        for _ in range(40):
            desired = with_store(body, version=version, storage=False)
            cluster.apply(rollout.staged(body, desired, cluster.observed(), [], now=NOW).desired)
            cluster.step()
    assert by_version(cluster)["chat-valkey"] == {"1"}
    assert by_version(cluster)["chat-gateway"] == {"2"}


def test_a_store_without_a_revision_that_is_not_ready_waits_while_gateways_change():
    """A store that an operator without revisions created."""
    cluster, body = Simulated(), pool(image="v1")
    for _ in range(5):
        cluster.apply(rollout.staged(body, with_store(body), cluster.observed(), [], now=NOW).desired)
        cluster.step()
    del cluster.stated["chat-valkey"]["metadata"]["annotations"]
    cluster.pods["chat-valkey"].clear()
    edited = pool(image="v1")
    edited["spec"]["gateway"] = {"replicas": 3}
    observed = cluster.observed()
    found = rollout.staged(edited, with_store(edited, version="2"), observed, [], now=NOW)
    assert found.held == ("chat-valkey",)
    (template,) = (item["spec"]["template"] for item in observed if item["metadata"]["name"] == "chat-valkey")
    assert found.desired[0]["spec"]["template"] == template


def test_the_inputs_of_a_pool_without_credentials_are_those_of_earlier_versions():
    """Else an upgrade of the operator would replace all pods."""
    body = pool(image="v1")
    inputs = {
        item["metadata"]["name"]: item["metadata"]["annotations"][rollout.INPUTS]
        for item in rollout.staged(body, with_store(body), [], [], now=NOW).desired
    }
    spec = body["spec"]
    own = [{"name": "a"} if key == "nodePools" else spec[key] for key in ("model", "engine", "nodePools")]
    assert inputs["chat-valkey"] == child_metadata.digest(spec["state"])
    assert inputs["chat-engine-a"] == child_metadata.digest([*own, None, None])


def with_class(ttft, **gateway):
    body = pool(image="v1")
    body["spec"] |= {"classes": [{"name": "chat", "weight": 1, "ttft": ttft}], "gateway": gateway}
    return body


def noted_by_an_earlier_version(body):
    """The annotation of its gateway."""
    uncounted = {**body["spec"], "nodePools": [{"name": name} for name in ("a", "b", "c")]}
    return child_metadata.digest(uncounted)


def test_a_gateway_of_an_earlier_version_is_not_restarted_by_an_upgrade_and_an_edit_of_it_still_is():
    cluster, body = Simulated(), with_class("1s")
    run(cluster, body, rounds=5)
    cluster.stated["chat-gateway"]["metadata"]["annotations"][rollout.INPUTS] = noted_by_an_earlier_version(body)
    run(cluster, body, version="2", rounds=5)
    assert by_version(cluster)["chat-gateway"] == {"1"}
    run(cluster, with_class("1s", replicas=3), version="2")
    assert by_version(cluster)["chat-gateway"] == {"2"}


def with_queue(**queue):
    body = pool(image="v1")
    body["spec"]["gateway"] = {"queue": {"maxRequests": 5000, **queue}}
    return body


def engine_inputs(body, node_pool):
    """The annotation of an earlier version."""
    spec = body["spec"]
    return child_metadata.digest([spec["model"], spec["engine"], {"name": node_pool}, spec["gateway"]["queue"], None])


@pytest.mark.parametrize("ttl", ["60s", "5m"])
def test_an_edit_of_the_wait_in_the_queue_of_gateways_restarts_no_engine_after_an_upgrade(ttl):
    cluster, body = Simulated(), with_queue(ttl=ttl)
    run(cluster, body, rounds=5)
    for name in "abc":
        cluster.stated[f"chat-engine-{name}"]["metadata"]["annotations"][rollout.INPUTS] = engine_inputs(body, name)
    writes = cluster.writes
    run(cluster, body, version="2", rounds=5)
    assert (cluster.writes == writes) is (ttl == "60s"), (
        "only with another wait than the default the inputs are new ones"
    )
    run(cluster, with_queue(ttl="10s"), version="2")
    assert [by_version(cluster)[f"chat-engine-{name}"] for name in "abc"] == [{"1"}] * 3
    run(cluster, with_queue(ttl="10s", maxRequests=7), version="2")
    assert [by_version(cluster)[f"chat-engine-{name}"] for name in "abc"] == [{"2"}] * 3


def test_an_edit_of_a_class_does_not_touch_the_deployment_of_the_gateways():
    cluster = Simulated()
    run(cluster, with_class("1s"), rounds=5)
    before = copy.deepcopy(cluster.stated["chat-gateway"])
    run(cluster, with_class("2s"), rounds=5)
    assert cluster.stated["chat-gateway"] == before
    run(cluster, with_class("2s"), version="2", rounds=5)
    assert by_version(cluster)["chat-gateway"] == {"1"}


def test_a_settled_pool_needs_no_write():
    cluster = started()
    writes = cluster.writes
    run(cluster, pool(image="v1"), rounds=5)
    assert cluster.writes == writes


@settings(max_examples=40)
@given(
    edits=st.lists(st.tuples(st.sampled_from(["v1", "v2", "v3", "bad"]), st.integers(1, 12)), max_size=4),
    spare=st.integers(0, 1),
)
def test_whatever_is_edited_and_when_each_node_pool_serves_and_a_good_edit_arrives(edits, spare):
    cluster = started(spare=spare)
    cluster.broken = {"bad"}
    for image, rounds in [*edits, ("v9", 120)]:
        _, least, settled = run(cluster, pool(image=image), rounds=rounds)
        assert min(least.values()) >= 1
    assert settled
    assert cluster.images() == {"v9"}


def test_a_workload_of_another_owner_is_rendered_in_full_for_the_plan_to_refuse():
    body = pool(image="v1")
    theirs = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "chat-engine-a", "namespace": "n"}}
    found = rollout.staged(body, manifests(body), [theirs], [], now=NOW)
    assert found.desired[0]["metadata"]["name"] == "chat-engine-a"
    assert found.problems == ()
