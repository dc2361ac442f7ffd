"""The devices of an engine's pod: what its container requests, and which nodes have the right product.

One product becomes a node selector. Several become a required node affinity, which each term of the affinity in the spec
gets too, because a node needs to satisfy only one of the terms.
"""

from typing import Any

from tidegate_operator import node_pool_spec
from tidegate_operator.pod_placement import Json
from tidegate_operator.render import default_resources

CLAIM = "gpu"
"""Name of the claim in the pod."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod_fields(node_pool: node_pool_spec.NodePool) -> dict[str, Any]:
    """The placement of an engine's pod, with its claim of devices."""
    devices, where = node_pool.devices, node_pool.engine.placement
    fields = where.pod_fields()
    products = devices.products if devices.count else ()
    if len(products) == 1:
        fields["nodeSelector"] = {devices.label: products[0], **where.node_selector}
    elif products:
        among = {"key": devices.label, "operator": "In", "values": list(products)}
        fields["affinity"] = _with_expression(where.affinity, among)
    if devices.claim_template:
        fields["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": devices.claim_template}]
    return fields


def resources(node_pool: node_pool_spec.NodePool) -> dict[str, Any]:
    """What the container of an engine requests, and its limits."""
    devices = node_pool.devices
    given = default_resources.completed(node_pool.engine.resources, default_resources.of_engine(node_pool))
    if devices.claim_template:
        return {**given, "claims": [{"name": CLAIM}]}
    if not devices.count:
        return given
    return {**given, "limits": {**given.get("limits", {}), devices.resource: str(devices.count)}}


def _with_expression(affinity: Json, expression: Json) -> dict[str, Any]:
    """The affinity, with `expression` among the requirements of every term for nodes."""
    of_nodes = affinity.get("nodeAffinity", {})
    terms = of_nodes.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{}]
    narrowed = [{**term, "matchExpressions": [*term.get("matchExpressions", ()), expression]} for term in terms]
    return {**affinity, "nodeAffinity": {**of_nodes, _REQUIRED: {"nodeSelectorTerms": narrowed}}}
