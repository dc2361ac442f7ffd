"""A canary is one engine beside the old ones until it is decided, and no decision costs an engine. The cluster is
simulated."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator import canary_hold, rollout

from .simulated_deployments import NOW, Simulated, manifests, pool, run, staged, started

CANARY = {"steps": [{"weight": 10, "duration": "1m"}]}


def under_canary(image, *, phase=None, reason="it serves worse", paused=False, cluster=None, canary=CANARY):
    """A pool with a canary, about whose present revision the status says `phase`."""
    body = pool(image=image)
    body["spec"]["rollout"] = {"canary": canary, "paused": paused} if canary else {"paused": paused}
    found = None if cluster is None else canary_hold.under_test(body, cluster.observed())
    if phase and found:
        body["status"] = {"rollout": {"nodePool": found.node_pool, "revision": found.revision, "phase": phase}}
        body["status"]["rollout"]["reason"] = reason
    return body


def decided(cluster, image, phase, *, rounds=80, **more):
    """As `run`, where each revision under test has been decided."""
    for _ in range(rounds):
        outcome = run(cluster, under_canary(image, phase=phase, cluster=cluster, **more), rounds=1)
    return outcome


def engines(cluster, image):
    """The engines of each node pool that have this image."""
    return {
        name: sum(pod["template"]["spec"].get("image") == image for pod in pods)
        for name, pods in cluster.pods.items()
        if "engine" in name
    }


@pytest.mark.parametrize("spare", [0, 1])
def test_until_it_is_decided_one_engine_of_one_node_pool_has_the_new_revision(spare):
    cluster = started(spare=spare)
    found, least, settled = run(cluster, under_canary("v2"))
    assert not settled
    assert engines(cluster, "v2") == {"chat-engine-a": 1, "chat-engine-b": 0, "chat-engine-c": 0}
    assert engines(cluster, "v1") == {"chat-engine-a": 1 + spare, "chat-engine-b": 2, "chat-engine-c": 2}
    assert least["chat-engine-a"] >= 1 + spare
    assert set(found.held) == {"chat-engine-b", "chat-engine-c"}
    assert found.told["chat-engine-a"].startswith("tests a new revision")
    assert canary_hold.under_test(under_canary("v2"), cluster.observed()).node_pool == "a"


def test_no_node_pool_that_lost_an_engine_changes_beside_a_canary():
    cluster = started()
    run(cluster, under_canary("v2"), rounds=10)
    cluster.lose("chat-engine-b")
    found, _, _ = run(cluster, under_canary("v2"))
    assert set(found.held) == {"chat-engine-b", "chat-engine-c"}
    assert engines(cluster, "v2") == {"chat-engine-a": 1, "chat-engine-b": 0, "chat-engine-c": 0}


def test_a_revision_has_served_even_if_an_edit_comes_as_soon_as_all_its_engines_do():
    """Else its node pool would count as under test while it waits for another one, which would wait for its own test."""
    cluster = started()
    while engines(cluster, "v2")["chat-engine-a"] < 2 or engines(cluster, "v1")["chat-engine-a"]:
        decided(cluster, "v2", "Promoted", rounds=1)
    cluster.step()
    cluster.lose("chat-engine-c")
    found = staged(cluster, under_canary("v3", phase="Promoted", cluster=cluster))
    assert set(found.held) == {"chat-engine-a", "chat-engine-b"}
    cluster.apply(found.desired)
    assert canary_hold.under_test(under_canary("v3"), cluster.observed()).node_pool == "c"


def test_a_promoted_revision_reaches_all_engines_one_node_pool_after_the_other():
    cluster = started()
    found, least, settled = decided(cluster, "v2", "Promoted")
    assert settled
    assert (found.held, found.problems, found.told) == ((), (), {})
    assert cluster.images() == {"v2"}
    assert set(least.values()) == {2}
    assert not any("minReadySeconds" in item["spec"] for item in cluster.observed())


def deadline_of_a(cluster):
    """The progress deadline of a Deployment, in years and seconds, and whether it holds a canary."""
    spec = cluster.stated["chat-engine-a"]["spec"]
    return *divmod(spec.get("progressDeadlineSeconds", 600), canary_hold.HELD_S), "minReadySeconds" in spec


@pytest.mark.parametrize("canary", [CANARY, None])
def test_the_ordinary_deadline_applies_again_as_soon_as_the_engine_of_a_canary_is_available(canary):
    """Not at once: the progress is as old as the canary until then. Removing the canary lets the revision go on too."""
    cluster = started()
    run(cluster, under_canary("v2"), rounds=10)
    assert deadline_of_a(cluster) == (1, 600, True)

    def go_on():
        body = under_canary("v2", phase=canary and "Promoted", cluster=cluster, canary=canary)
        cluster.apply(staged(cluster, body).desired)

    go_on()
    assert deadline_of_a(cluster) == (1, 600, False)
    go_on()  # the Deployment's controller has not seen it yet
    assert deadline_of_a(cluster) == (1, 600, False)
    cluster.step()
    assert engines(cluster, "v1")["chat-engine-a"]
    for _ in range(3):
        go_on()
        assert deadline_of_a(cluster) == (0, 600, False)


@pytest.mark.parametrize("spare", [0, 1])
def test_a_revision_that_failed_its_test_is_taken_back_and_the_sentence_is_told(spare):
    cluster = started(spare=spare)
    run(cluster, under_canary("v2"), rounds=10)
    found, _, settled = decided(cluster, "v2", "Failed")
    assert settled
    assert cluster.images() == {"v1"}
    ((reason, message),) = found.problems
    assert reason == "RolledBack"
    assert message == "chat-engine-a failed the test of the new spec and runs the last one that served: it serves worse"
    assert set(found.held) == {"chat-engine-b", "chat-engine-c"}
    assert canary_hold.under_test(under_canary("v2"), cluster.observed()) is None


def test_a_canary_whose_image_does_not_exist_is_taken_back_without_a_decision():
    cluster = started()
    cluster.broken = {"bad"}
    found, least, settled = run(cluster, under_canary("bad"))
    assert settled
    assert cluster.images() == {"v1"}
    assert set(least.values()) == {2}
    assert found.problems[0][1].startswith("chat-engine-a did not serve")


def test_an_edit_during_a_canary_replaces_the_canary():
    cluster = started()
    run(cluster, under_canary("v2"), rounds=10)
    run(cluster, under_canary("v3"), rounds=10)
    assert cluster.images() == {"v1", "v3"}
    assert engines(cluster, "v3")["chat-engine-a"] == 1


def test_an_edit_that_is_undone_during_its_canary_leaves_the_old_engines():
    cluster = started()
    before = [pod for pods in cluster.pods.values() for pod in pods]
    run(cluster, under_canary("v2"), rounds=10)
    _, _, settled = run(cluster, under_canary("v1"))
    assert settled
    assert all(any(pod is old for old in before) for pods in cluster.pods.values() for pod in pods)


def test_a_decision_about_another_revision_decides_nothing():
    cluster = started()
    run(cluster, under_canary("v2"), rounds=10)
    stale = under_canary("v3", phase="Promoted", cluster=cluster)
    run(cluster, stale, rounds=40)
    assert engines(cluster, "v3")["chat-engine-a"] == 1


def test_a_new_pool_and_a_pool_without_engines_have_no_canary():
    cluster = Simulated()
    _, _, settled = run(cluster, under_canary("v1"), rounds=5)
    assert settled
    empty = under_canary("v2")
    desired = [copy.deepcopy(item) for item in manifests(empty)]
    for item in desired:
        item["spec"]["replicas"] = 0
    found = rollout.staged(empty, desired, cluster.observed(), [], now=NOW)
    assert not any("minReadySeconds" in item["spec"] for item in found.desired)


def test_while_paused_no_engine_gets_a_new_revision_and_the_edit_can_be_undone():
    for canary in (CANARY, None):
        cluster = started()
        run(cluster, under_canary("v1", canary=canary))
        before = copy.deepcopy(cluster.pods)
        found, _, _ = run(cluster, under_canary("v2", paused=True, canary=canary))
        assert cluster.pods == before
        assert found.told["chat-engine-a"] == rollout.PAUSED
        run(cluster, under_canary("v2", canary=canary), rounds=2)
        half = copy.deepcopy(cluster.pods)
        found, _, _ = run(cluster, under_canary("v2", paused=True, canary=canary))
        assert cluster.images() == {"v1", "v2"}
        assert engines(cluster, "v2")["chat-engine-a"] == 1
        assert len(cluster.pods["chat-engine-b"]) == len(half["chat-engine-b"])
        assert "paused" in found.told["chat-engine-a"]
        _, _, settled = run(cluster, under_canary("v1", paused=True, canary=canary))
        assert settled
        assert cluster.images() == {"v1"}


def test_a_failed_test_is_taken_back_while_paused():
    cluster = started()
    run(cluster, under_canary("v2"), rounds=10)
    _, _, settled = decided(cluster, "v2", "Failed", paused=True)
    assert settled
    assert cluster.images() == {"v1"}


def test_the_group_is_no_input_of_any_pod():
    """Else a canary that is added to a pool would replace the gateways."""
    body, plain = under_canary("v1", paused=True), pool(image="v1")
    inputs = [
        [
            item["metadata"]["annotations"][rollout.INPUTS]
            for item in rollout.staged(each, manifests(each), [], [], now=NOW).desired
        ]
        for each in (body, plain)
    ]
    assert inputs[0] == inputs[1]


moves = st.tuples(
    st.sampled_from(["v1", "v2", "v3", "bad"]),
    st.sampled_from([None, "Starting", "Testing", "Promoted", "Failed"]),
    st.booleans(),
    st.integers(1, 12),
)


@settings(max_examples=25)
@given(moves=st.lists(moves, max_size=5), spare=st.integers(0, 1))
def test_whatever_is_edited_decided_and_paused_each_node_pool_serves_and_the_old_revision_comes_back(moves, spare):
    cluster = started(spare=spare)
    cluster.broken = {"bad"}
    for image, phase, paused, rounds in moves:
        for _ in range(rounds):
            body = under_canary(image, phase=phase, paused=paused, cluster=cluster)
            found = staged(cluster, body)
            changing = [
                item["metadata"]["name"]
                for item in found.desired
                if "node-pool" in str(item["metadata"]["labels"])
                and canary_hold.replaces(
                    item["metadata"]["annotations"][rollout.REVISION], item["metadata"]["annotations"]
                )
            ]
            assert len(changing) <= 1, "two node pools would test a revision at once"
            cluster.apply(found.desired)
            cluster.step()
            assert min(cluster.serving().values()) >= 1
    _, least, settled = decided(cluster, "v9", "Promoted", rounds=160)
    assert settled
    assert cluster.images() == {"v9"}
    assert min(least.values()) >= 1


@pytest.mark.parametrize("text", ["{not json", "[]", "7", "", "[" * 100_000, "{}", '{"revision": "0"}'])
@pytest.mark.parametrize("key", [canary_hold.SERVED, rollout.FAILED])
def test_an_annotation_that_a_person_has_broken_stops_no_edit(key, text):
    cluster = started()
    for each in cluster.stated.values():
        if canary_hold.SERVED in each["metadata"].get("annotations", {}):
            each["metadata"]["annotations"][key] = text
    cluster.lose("chat-engine-a")
    _, _, settled = run(cluster, pool(image="v2"))
    assert settled
    assert set(engines(cluster, "v2").values()) == {2}
