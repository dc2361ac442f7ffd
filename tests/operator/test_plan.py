import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator import objects, plan

OWNER = "pool-uid"


def manifest(name, kind="ConfigMap", **body):
    owner = {"uid": OWNER, "controller": True, "name": "chat"}
    metadata = {"name": name, "namespace": "prod", "labels": {"a": "b"}, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **body}


def stored(applied, uid="u", **more):
    """An applied manifest as the API server stores it: with a uid, defaults, and without empty values."""
    body = copy.deepcopy(dict(applied))
    body["metadata"]["uid"] = uid
    body.update(more)
    return {key: value for key, value in body.items() if value not in ({}, [], "")}


def after(steps, observed):
    """The objects that exist after the steps."""
    gone = {reference for reference, _ in steps.delete}
    kept = {objects.Reference.of(body): body for body in observed}
    kept |= {objects.Reference.of(body): stored(body) for body in steps.apply}
    return [body for reference, body in kept.items() if reference not in gone]


def names(items):
    return [item["metadata"]["name"] for item in items]


def test_missing_objects_are_applied_in_the_given_order():
    steps = plan.steps(OWNER, [manifest("b"), manifest("a")], [])
    assert names(steps.apply) == ["b", "a"]


def test_an_object_with_the_stated_values_is_not_applied_whatever_else_it_has():
    (applied,) = plan.steps(OWNER, [manifest("a", data={"x": "1"}, empty={}, none=[])], []).apply
    world = [stored(applied, immutable=False, data={"x": "1", "theirs": "2"})]
    assert plan.steps(OWNER, [manifest("a", data={"x": "1"}, empty={}, none=[])], world).apply == ()


def test_a_changed_value_is_applied_again():
    (applied,) = plan.steps(OWNER, [manifest("a", data={"x": "1"})], []).apply
    assert names(plan.steps(OWNER, [manifest("a", data={"x": "1"})], [stored(applied, data={"x": "2"})]).apply) == ["a"]


def pod_of(*env, args=("serve",)):
    containers = [{"name": "main", "env": [{"name": name, "value": value} for name, value in env], "args": [*args]}]
    return {"spec": {"template": {"spec": {"containers": containers}}}}


@pytest.mark.parametrize(
    ("found", "applied"),
    [
        (pod_of(("THEIRS", "1"), ("OURS", "1")), []),
        (pod_of(("THEIRS", "1"), ("OURS", "2")), ["a"]),
        (pod_of(("THEIRS", "1"), ("MORE", "1")), ["a"]),
        (pod_of(("OURS", "1"), args=("serve", "more")), ["a"]),
    ],
)
def test_an_item_that_others_added_to_a_list_stays_unless_the_list_is_one_value(found, applied):
    ours = manifest("a", **pod_of(("OURS", "1")))
    (written,) = plan.steps(OWNER, [ours], []).apply
    assert names(plan.steps(OWNER, [ours], [stored(written, **found)]).apply) == applied


def test_a_number_of_engines_that_another_one_set_and_that_is_desired_now_leads_to_no_write():
    (written,) = plan.steps(OWNER, [manifest("a", spec={"replicas": 1})], []).apply
    scaled = stored(written, spec={"replicas": 5})
    assert plan.steps(OWNER, [manifest("a", spec={"replicas": 5})], [scaled]).apply == ()
    assert names(plan.steps(OWNER, [manifest("a", spec={"replicas": 2})], [scaled]).apply) == ["a"]


def test_a_value_that_is_no_longer_stated_is_withdrawn():
    (applied,) = plan.steps(OWNER, [manifest("a", data={"x": "1", "y": "2"})], []).apply
    assert names(plan.steps(OWNER, [manifest("a", data={"x": "1"})], [stored(applied)]).apply) == ["a"]


def test_an_object_that_is_no_longer_desired_is_deleted_by_its_uid():
    (applied,) = plan.steps(OWNER, [manifest("old")], []).apply
    ((reference, uid),) = plan.steps(OWNER, [], [stored(applied, uid="old-uid")]).delete
    assert (str(reference), uid) == ("ConfigMap old", "old-uid")


def test_an_object_under_deletion_is_not_deleted_again_and_counts_as_missing():
    (applied,) = plan.steps(OWNER, [manifest("a")], []).apply
    leaving = stored(applied)
    leaving["metadata"]["deletionTimestamp"] = "now"
    assert plan.steps(OWNER, [], [leaving]).delete == ()
    assert names(plan.steps(OWNER, [manifest("a")], [leaving]).apply) == ["a"]


def test_objects_of_other_owners_are_not_touched():
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "prod", "uid": "x"}}
    steps = plan.steps(OWNER, [manifest("a"), manifest("b")], [theirs])
    assert [str(reference) for reference in steps.taken] == ["ConfigMap a"]
    assert names(steps.apply) == ["b"]
    assert plan.steps(OWNER, [], [theirs]) == plan.Steps(apply=(), delete=(), taken=())


def deployment(name, *, replicas=1, node_pool=None, ready=None):
    """A desired workload; with `ready`, the workload as its controller reports it."""
    body = manifest(name, "Deployment", spec={"replicas": replicas})
    tags = {"app.kubernetes.io/component": "engine" if node_pool else "gateway"}
    body["metadata"]["labels"] = {**tags, **({"tidegate.dev/node-pool": node_pool} if node_pool else {})}
    body["apiVersion"] = "apps/v1"
    if ready is None:
        return body
    body["metadata"]["generation"] = 1
    counts = {"replicas": replicas, "updatedReplicas": replicas, "readyReplicas": ready}
    return {**body, "status": {"observedGeneration": 1, **counts}}


@pytest.mark.parametrize(
    ("engines", "gateway", "spared"),
    [
        pytest.param(1, 1, True, id="all serve"),
        pytest.param(0, 1, False, id="an engine starts"),
        pytest.param(1, 0, False, id="a gateway starts"),
        pytest.param(None, 1, False, id="an engine is not there yet"),
    ],
)
def test_old_engines_stay_until_the_desired_engines_and_gateways_serve(engines, gateway, spared):
    desired = [deployment("new", node_pool="new"), deployment("gateway")]
    current = [deployment("old", node_pool="old", ready=1), deployment("gateway", ready=gateway)]
    if engines is not None:
        current.append(deployment("new", node_pool="new", ready=engines))
    assert plan.can_spare(desired, current) is spared


def test_a_pool_without_desired_engines_waits_for_nothing():
    desired = [deployment("new", node_pool="new", replicas=0), deployment("gateway")]
    assert plan.can_spare(desired, [deployment("gateway", ready=0)])


@st.composite
def worlds(draw):
    """Some desired manifests, and the objects that exist for other manifests that were desired before."""

    def some():
        chosen = draw(st.lists(st.sampled_from("abcdef"), unique=True))
        kinds = st.sampled_from(["ConfigMap", "Service", "ServiceAccount"])
        values = st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["1", "2", ""]))
        return [manifest(name, draw(kinds), data=draw(values)) for name in chosen]

    before = plan.steps(OWNER, some(), []).apply
    return some(), [stored(body) for body in before]


@given(worlds())
def test_no_steps_are_left_after_the_steps_are_carried_out(world):
    desired, observed = world
    done = after(plan.steps(OWNER, desired, observed), observed)
    assert plan.steps(OWNER, desired, done) == plan.Steps(apply=(), delete=(), taken=())
    assert {objects.Reference.of(body) for body in done} == {objects.Reference.of(body) for body in desired}
