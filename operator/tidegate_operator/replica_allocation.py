"""How many engines does each node pool run? `kubectl scale` sets one total, which this module divides.

Pure and without memory: the same total gives the same allocation, whatever the previous totals were.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tidegate_operator import node_pool_spec, spec
from tidegate_operator.render import child_metadata

STATED = "tidegate.dev/stated-replicas"
"""Annotation of a pool: the `spec.replicas` that the operator wrote, because the spec had none."""
NOTHING_FOUND: Mapping[str, int] = MappingProxyType({})


def of_deployments(children: Iterable[spec.Json]) -> Mapping[str, int]:
    """The number of engines that the Deployment of each node pool asks for, by the node pool's name."""
    return {
        child["metadata"]["labels"][child_metadata.NODE_POOL]: child["spec"].get("replicas", 1)
        for child in children
        if child["kind"] == "Deployment" and child_metadata.NODE_POOL in child["metadata"]["labels"]
    }


def desired(pool: spec.Pool, found: Mapping[str, int] = NOTHING_FOUND) -> Mapping[str, int]:
    """Engines for each node pool, by its name. `found` is the result of `of_deployments`.

    A node pool that an external autoscaler scales keeps what is found, and starts from its `replicas`. A node pool that the
    pool's own autoscaler scales has what this wants; before the first decision it keeps what is found, within its bounds.
    One of which the autoscaler decides nothing, because another one scales it, keeps what is found. For the others:

    Without spec.replicas it is the `replicas` of each node pool. With spec.replicas every node pool first gets its
    `minReplicas`. The rest goes to the cheapest node pools, first up to their `replicas` and then up to their
    `maxReplicas`. So a total that equals the sum of `replicas` gives each node pool its `replicas`, and a smaller total
    takes engines from the most expensive node pools first.
    """
    external = {each.name: found.get(each.name, each.replicas) for each in pool.node_pools if each.external}
    external |= {each.name: _autoscaled(pool, each, found) for each in pool.node_pools if each.autoscaled}
    own = [node_pool for node_pool in pool.node_pools if node_pool.name not in external]
    if pool.replicas is None:
        return {node_pool.name: node_pool.replicas for node_pool in own} | external
    counts = {node_pool.name: node_pool.min_replicas for node_pool in own}
    left = pool.replicas - sum(counts.values())
    by_cost = sorted(own, key=lambda node_pool: (node_pool.engine_cost, node_pool.name))
    for limits in (_own(by_cost), _most(by_cost)):
        for name, limit in limits:
            room = left if limit is None else min(left, limit - counts[name])
            counts[name] += max(room, 0)
            left -= max(room, 0)
    return counts | external


def total_to_state(body: spec.Json) -> int | None:
    """The total that the operator must write to `spec.replicas`, so that `/scale` and autoscalers find one; None if the
    total there is current or was set by somebody else. `body` is a ServingPool.

    The annotation `STATED` holds the total that the operator wrote. Another value in `spec.replicas` is a scaler's.
    """
    own = sum(item["replicas"] for item in body["spec"]["nodePools"] if item["scaledBy"] == "pool")
    found = body["spec"].get("replicas")
    stated = body["metadata"].get("annotations", {}).get(STATED)
    is_ours = found is None or str(found) == stated
    return own if is_ours and found != own else None


def _autoscaled(pool: spec.Pool, node_pool: node_pool_spec.NodePool, found: Mapping[str, int]) -> int:
    """The engines of a node pool that the pool's own autoscaler scales."""
    if pool.has_decision and node_pool.name not in pool.wanted and node_pool.name in found:
        return found[node_pool.name]
    most = node_pool.max_replicas if node_pool.max_replicas is not None else node_pool.min_replicas
    wanted = pool.wanted.get(node_pool.name, found.get(node_pool.name, node_pool.replicas))
    return min(max(wanted, node_pool.min_replicas), most)


def _own(node_pools: Iterable[node_pool_spec.NodePool]) -> list[tuple[str, int | None]]:
    return [(node_pool.name, node_pool.replicas) for node_pool in node_pools]


def _most(node_pools: Iterable[node_pool_spec.NodePool]) -> list[tuple[str, int | None]]:
    return [(node_pool.name, node_pool.max_replicas) for node_pool in node_pools]
