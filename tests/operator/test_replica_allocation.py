import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator import node_pool_spec, replica_allocation


def node_pool(name, *, replicas=1, least=0, most=None, gpus=1, cost=1.0, external=False, scaled_by="pool"):
    item = {
        "name": name, "replicas": replicas, "minReplicas": least, "gpus": gpus, "costWeight": cost, "tensorParallel": 1,
        "scaledBy": "external" if external else scaled_by, **({} if most is None else {"maxReplicas": most}),
    }  # fmt: skip
    engine = {"kind": "vllm", "sharedMemory": "8Gi", "startupTimeout": "20m", "drainTimeout": "10m"}
    return node_pool_spec.node_pool(item, engine, {"name": "demo"})


@dataclasses.dataclass(frozen=True)
class Pool:
    """The fields of a pool that the allocation reads."""

    node_pools: tuple[node_pool_spec.NodePool, ...]
    replicas: int | None = None
    wanted: dict[str, int] = dataclasses.field(default_factory=dict)
    has_decision: bool = False


def test_without_a_total_each_node_pool_runs_its_own_replicas():
    assert replica_allocation.desired(Pool((node_pool("a", replicas=2), node_pool("b", replicas=3)))) == {
        "a": 2,
        "b": 3,
    }


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        pytest.param(1, {"cheap": 0, "dear": 1}, id="minima first"),
        pytest.param(3, {"cheap": 2, "dear": 1}, id="then the cheapest up to its own number"),
        pytest.param(5, {"cheap": 3, "dear": 2}, id="the sum of the numbers is what is written"),
        pytest.param(7, {"cheap": 5, "dear": 2}, id="beyond it the cheapest up to its maximum"),
        pytest.param(9, {"cheap": 5, "dear": 4}, id="then the dearer"),
    ],
)
def test_a_total_is_divided_among_the_node_pools(total, expected):
    pools = (node_pool("dear", replicas=2, least=1, gpus=8, cost=2.0), node_pool("cheap", replicas=3, most=5, gpus=8))
    assert replica_allocation.desired(Pool(pools, total)) == expected


@st.composite
def pools(draw):
    def one(index):
        least = draw(st.integers(0, 3))
        replicas = least + draw(st.integers(0, 3))
        most = draw(st.none() | st.integers(replicas, replicas + 3))
        return node_pool(
            f"p{index}", replicas=replicas, least=least, most=most, cost=draw(st.sampled_from([0.0, 1.0, 2.0]))
        )

    node_pools = tuple(one(index) for index in range(draw(st.integers(1, 5))))
    low = sum(item.min_replicas for item in node_pools)
    bounded = all(item.max_replicas is not None for item in node_pools)
    high = sum(item.max_replicas for item in node_pools) if bounded else low + 20
    return Pool(node_pools, draw(st.integers(low, high)))


@given(pools())
def test_every_total_is_met_within_all_bounds(pool):
    counts = replica_allocation.desired(pool)
    assert sum(counts.values()) == pool.replicas
    for item in pool.node_pools:
        assert (
            item.min_replicas
            <= counts[item.name]
            <= (counts[item.name] if item.max_replicas is None else item.max_replicas)
        )


@given(pools(), st.randoms())
def test_the_order_in_which_node_pools_are_written_does_not_matter(pool, random):
    shuffled = list(pool.node_pools)
    random.shuffle(shuffled)
    assert replica_allocation.desired(Pool(tuple(shuffled), pool.replicas)) == replica_allocation.desired(pool)


def test_a_node_pool_of_an_external_autoscaler_keeps_its_number_and_counts_in_no_total():
    pool = Pool((node_pool("own", replicas=2, most=4), node_pool("theirs", replicas=1, external=True)), replicas=3)
    assert replica_allocation.desired(pool) == {"own": 3, "theirs": 1}
    assert replica_allocation.desired(pool, {"own": 9, "theirs": 5}) == {"own": 3, "theirs": 5}
    assert replica_allocation.desired(Pool(pool.node_pools), {"theirs": 0}) == {"own": 2, "theirs": 0}


def test_a_node_pool_of_the_own_autoscaler_has_what_it_wants_within_its_bounds_and_counts_in_no_total():
    own = node_pool("own", replicas=1, least=0, most=4, scaled_by="autoscaler")
    pool = Pool((own, node_pool("rest")), replicas=3)
    assert replica_allocation.desired(pool) == {"own": 1, "rest": 3}, "it starts from its replicas"
    assert replica_allocation.desired(pool, {"own": 2, "rest": 1}) == {"own": 2, "rest": 3}, (
        "then it keeps what is there"
    )
    decided = dataclasses.replace(pool, wanted={"own": 0})
    assert replica_allocation.desired(decided, {"own": 2}) == {"own": 0, "rest": 3}
    edited = dataclasses.replace(pool, wanted={"own": 9})
    assert replica_allocation.desired(edited) == {"own": 4, "rest": 3}, "an edit of the bounds holds at once"
