"""What the steps of a node pool's engines cost, as its profile says."""

import tidegate_profiles
from tidegate_operator import node_pool_spec
from tidegate_policy import cost


def model(engine: node_pool_spec.Engine, node_pool: node_pool_spec.NodePool) -> cost.CostModel | None:
    """The cost model of an engine; None without a profile. A simulated engine may run at another speed than its profile."""
    if node_pool.own_profile is not None:
        found = node_pool.own_profile.cost
    elif node_pool.profile is not None:
        found = cost.from_mapping(tidegate_profiles.load(node_pool.profile)["cost"])
    else:
        return None
    return cost.scaled(found, 1 / engine.sim_speed) if engine.simulated and engine.sim_speed != 1 else found
