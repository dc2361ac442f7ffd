"""How many engines does each node pool run? `kubectl scale` sets one total, which this module divides.

Pure and without memory: the same total gives the same allocation, whatever the previous totals were.
"""

from collections.abc import Iterable, Mapping

from tidegate_operator import spec

STATED = "tidegate.dev/stated-replicas"
"""Annotation of a pool: the `spec.replicas` that the operator wrote, because the spec had none."""


def desired(pool: spec.Pool) -> Mapping[str, int]:
    """Engines for each node pool, by its name.

    Without spec.replicas it is the `replicas` of each node pool. With spec.replicas every node pool first gets its
    `minReplicas`. The rest goes to the cheapest node pools, first up to their `replicas` and then up to their
    `maxReplicas`. So a total that equals the sum of `replicas` gives each node pool its `replicas`, and a smaller total
    takes engines from the most expensive node pools first.
    """
    if pool.replicas is None:
        return {node_pool.name: node_pool.replicas for node_pool in pool.node_pools}
    counts = {node_pool.name: node_pool.min_replicas for node_pool in pool.node_pools}
    left = pool.replicas - sum(counts.values())
    by_cost = sorted(pool.node_pools, key=lambda node_pool: (node_pool.engine_cost, node_pool.name))
    for limits in (_own(by_cost), _most(by_cost)):
        for name, limit in limits:
            room = left if limit is None else min(left, limit - counts[name])
            counts[name] += max(room, 0)
            left -= max(room, 0)
    return counts


def total_to_state(body: spec.Json) -> int | None:
    """The total that the operator must write to `spec.replicas`, so that `/scale` and autoscalers find one; None if the
    total there is current or was set by somebody else. `body` is a ServingPool.

    The annotation `STATED` holds the total that the operator wrote. Another value in `spec.replicas` is a scaler's.
    """
    own = sum(item["replicas"] for item in body["spec"]["nodePools"])
    found = body["spec"].get("replicas")
    stated = body["metadata"].get("annotations", {}).get(STATED)
    is_ours = found is None or str(found) == stated
    return own if is_ours and found != own else None


def _own(node_pools: Iterable[spec.NodePool]) -> list[tuple[str, int | None]]:
    return [(node_pool.name, node_pool.replicas) for node_pool in node_pools]


def _most(node_pools: Iterable[spec.NodePool]) -> list[tuple[str, int | None]]:
    return [(node_pool.name, node_pool.max_replicas) for node_pool in node_pools]
