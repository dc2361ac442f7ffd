"""An old engine stops for a new one only after the lack of room has lasted, and never while another engine makes room."""

import datetime

import pytest

from tidegate_operator import engine_place, engine_room

from .simulated_deployments import NOW, STEP_S, Simulated, pool, run

PATIENCE = int(engine_room.PATIENCE_S / STEP_S)
"""Steps of the simulated cluster."""


def alone(image, *, replicas, **more):
    body = pool(image=image)
    body["spec"]["nodePools"] = [{"name": "a", "replicas": replicas, **more}]
    return body


def strategy(cluster):
    return cluster.stated["chat-engine-a"]["spec"]["strategy"].get("rollingUpdate")


def notes(cluster):
    return cluster.stated["chat-engine-a"]["metadata"]["annotations"]


@pytest.mark.parametrize("drain_s", [STEP_S, 20 * STEP_S])
def test_an_engine_that_leaves_makes_room_for_the_next_new_one_and_no_further_engine_stops(drain_s):
    cluster = Simulated(spare=1, drain_s=drain_s)
    run(cluster, alone("v1", replicas=3), rounds=5)
    _, least, settled = run(cluster, alone("v2", replicas=3), rounds=120)
    assert settled
    assert cluster.images() == {"v2"}
    assert least == {"chat-engine-a": 3}
    assert strategy(cluster) is None
    assert engine_room.SINCE not in notes(cluster)


def test_the_only_engine_stops_for_a_new_one_only_after_the_lack_of_room_has_lasted():
    cluster = Simulated(spare=0)
    run(cluster, alone("v1", replicas=1), rounds=5)
    run(cluster, alone("v2", replicas=1), rounds=1)
    for _ in range(PATIENCE):
        found, _, _ = run(cluster, alone("v2", replicas=1), rounds=1)
        assert cluster.images() == {"v1", "v2"}
        assert strategy(cluster) is None
        assert found.told["chat-engine-a"] == engine_room.WAITS.format(60)
    found, _, _ = run(cluster, alone("v2", replicas=1), rounds=1)
    assert strategy(cluster) == engine_place.IN_PLACE
    assert found.told == {}
    _, _, settled = run(cluster, alone("v2", replicas=1), rounds=10)
    assert settled
    assert cluster.images() == {"v2"}
    assert engine_room.SINCE not in notes(cluster)


def test_a_node_that_comes_in_time_costs_no_engine():
    cluster = Simulated(spare=0)
    run(cluster, alone("v1", replicas=1), rounds=5)
    run(cluster, alone("v2", replicas=1), rounds=PATIENCE)
    cluster.spare = 1
    _, least, settled = run(cluster, alone("v2", replicas=1), rounds=10)
    assert settled
    assert least == {"chat-engine-a": 1}
    assert cluster.images() == {"v2"}


def test_a_lack_of_room_that_ended_does_not_count_for_the_next_engine():
    """The scheduler may take a moment to see the room that an engine left, and its condition is old by then."""
    cluster = Simulated(spare=1, drain_s=20 * STEP_S)
    run(cluster, alone("v1", replicas=2), rounds=5)
    for _ in range(60):
        found, _, _ = run(cluster, alone("v2", replicas=2), rounds=1)
        cluster.spare = 0 if cluster.leaving["chat-engine-a"] else cluster.spare
        if found.told:
            break
    assert found.told["chat-engine-a"] == engine_room.WAITS.format(60)
    assert not cluster.leaving["chat-engine-a"]
    assert strategy(cluster) is None
    cluster.spare = 1
    _, least, settled = run(cluster, alone("v2", replicas=2))
    assert settled
    assert least == {"chat-engine-a": 2}


def test_where_the_autoscaler_starts_engines_the_time_is_that_in_which_it_expects_a_node():
    body = alone("v1", replicas=1)
    assert engine_room.patience_s(body, 900) == 60
    assert engine_room.patience_s(alone("v1", replicas=1, scaledBy="autoscaler"), 900) == 300
    body = alone("v1", replicas=1, scaledBy="autoscaler")
    body["spec"]["autoscaling"] = {"schedulingTimeout": "2m"}
    assert engine_room.patience_s(body, 900) == 120
    body["spec"]["autoscaling"] = {"schedulingTimeout": "1h"}
    assert engine_room.patience_s(body, 900) == 450, "the change must not be taken back before"


def leaving(*, after_s=600.0, requests="1", node_pool="a", node="node"):
    """An engine that has time to finish its calls until `after_s` from now."""
    until = (NOW + datetime.timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {"labels": {"tidegate.dev/node-pool": node_pool}, "deletionTimestamp": until}
    return {"metadata": metadata, "spec": spec(requests) | {"nodeName": node}}


def spec(gpus):
    return {"containers": [{"resources": {"requests": {"nvidia.com/gpu": gpus}}}]}


def is_freed(pod, **more):
    return engine_room.is_freed_soon([engine_place.Asks(spec=spec("1"), **more)], [pod], NOW)


def test_room_comes_from_engines_of_the_pool_that_leave_a_place_which_the_new_one_can_take():
    assert is_freed(leaving())
    assert is_freed(leaving(node_pool="b"), limits=True)
    assert not is_freed(leaving(requests="0.5"))
    assert not is_freed(leaving(node=""))
    gateway = leaving()
    del gateway["metadata"]["labels"]["tidegate.dev/node-pool"]
    assert not is_freed(gateway)
    stays = leaving()
    del stays["metadata"]["deletionTimestamp"]
    assert not is_freed(stays)


def test_an_engine_of_a_lost_node_which_never_ends_is_not_waited_for():
    assert is_freed(leaving(after_s=-30))
    assert not is_freed(leaving(after_s=-60))
