"""The profile of a node pool's engines, if it is not a shipped one: the ConfigMap from which they read it when they start.

The key is the same for every profile, so that engines of an earlier revision of the node pool find one too. An engine of
vLLM corrects its costs by its own steps, so a changed profile restarts none. A simulated engine is as fast as its profile
says, so it is replaced.
"""

from collections.abc import Iterator
from typing import Any

from tidegate_operator import node_pool_spec, own_profile, spec
from tidegate_operator.render import child_metadata

FOLDER, VOLUME = "/etc/tidegate-profile", "tidegate-profile"
NAME, TEXT = "name", "profile.yaml"
"""Keys of the ConfigMap."""


def manifests(
    pool: spec.Pool, node_pool: node_pool_spec.NodePool, name: str, component: str
) -> Iterator[child_metadata.Manifest]:
    if (own := node_pool.own_profile) is not None:
        data = {NAME: own.name, TEXT: own.text}
        yield child_metadata.manifest(pool, "v1", "ConfigMap", name, component, node_pool=node_pool.name, data=data)


def of_config_map(body: spec.Json) -> own_profile.OwnProfile | None:
    """The profile in such a ConfigMap; None if it has none that can be used."""
    try:
        return own_profile.parse(body["data"][TEXT], body["data"][NAME])
    except (KeyError, TypeError, own_profile.Unusable):
        return None


def arguments(node_pool: node_pool_spec.NodePool) -> Iterator[str]:
    if node_pool.own_profile is not None:
        yield f"--profile={FOLDER}/{node_pool.own_profile.name}.yaml"
    elif node_pool.profile:
        yield f"--profile={node_pool.profile}"


def mounts(node_pool: node_pool_spec.NodePool) -> list[dict[str, Any]]:
    return [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}] if node_pool.own_profile else []


def volumes(node_pool: node_pool_spec.NodePool, config_map: str) -> list[dict[str, Any]]:
    if (own := node_pool.own_profile) is None:
        return []
    items = [{"key": TEXT, "path": f"{own.name}.yaml"}]
    return [{"name": VOLUME, "configMap": {"name": config_map, "items": items}}]


def annotations(node_pool: node_pool_spec.NodePool) -> dict[str, str]:
    """Of the pods of engines."""
    if (own := node_pool.own_profile) is None:
        return {}
    return {
        child_metadata.PROFILE_DIGEST: child_metadata.digest(
            own.coefficients if node_pool.engine.simulated else own.name
        )
    }


def gateway_annotations(pool: spec.Pool) -> dict[str, str]:
    """Of the pods of gateways, which read the costs of all engines."""
    own = {each.name: each.own_profile.coefficients for each in pool.node_pools if each.own_profile is not None}
    return {child_metadata.PROFILE_DIGEST: child_metadata.digest(own)} if own else {}
