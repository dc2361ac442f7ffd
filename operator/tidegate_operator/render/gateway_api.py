"""The objects by which a Gateway of the cluster sends calls to a pool: an InferencePool whose endpoint picker is the
pool's gateway, an HTTPRoute, and an InferenceObjective for each class.

The proxy of the Gateway connects to engines and to the picker, so the NetworkPolicies of both admit it (`proxies`).
"""

import re
from collections.abc import Iterator
from typing import Any

from tidegate_operator import spec
from tidegate_operator.render import child_metadata

COMPONENT = "gateway"
INFERENCE, ROUTES, OBJECTIVES = "inference.networking.k8s.io", "gateway.networking.k8s.io", "llm-d.ai"
"""API groups of InferencePools, of HTTPRoutes, and of InferenceObjectives."""
PORTS = {"ext-proc": child_metadata.EXT_PROC_PORT}
ANSWERED_BY_GATEWAY = ("/v1/workflows", "/v1/relqueries")
"""Paths that need the HTTP port of the gateway, because some of their answers are streams of events."""
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
OBJECT_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
SHEDDABLE = -1
"""`priority` of a class whose calls are shed first: pickers shed those below 0. All other classes have 0, because
classes of a pool have no order of importance beyond that. A greater `priority` is more important there, and urgency
counts the other way here; nothing else turns one into the other."""


def manifests(pool: spec.Pool) -> Iterator[child_metadata.Manifest]:
    """None unless the spec names a Gateway."""
    api = pool.gateway.api
    if api is None:
        return
    name = child_metadata.component_name(pool, COMPONENT)
    yield child_metadata.manifest(
        pool, f"{INFERENCE}/v1", "InferencePool", pool.name, COMPONENT,
        spec={
            "selector": {"matchLabels": child_metadata.selector(pool.name, "engine")},
            "targetPorts": [{"number": child_metadata.HTTP_PORT}],
            "endpointPickerRef": {
                "name": name,
                "port": {"number": child_metadata.EXT_PROC_PORT},
                "failureMode": api.failure_mode,
            },
        },
    )  # fmt: skip
    yield child_metadata.manifest(
        pool, f"{ROUTES}/v1", "HTTPRoute", pool.name, COMPONENT,
        spec={
            "parentRefs": [dict(api.parent)],
            **({"hostnames": list(api.hostnames)} if api.hostnames else {}),
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": path}} for path in ANSWERED_BY_GATEWAY],
                    "backendRefs": [{"name": name, "port": child_metadata.HTTP_PORT}],
                    "timeouts": {"request": "0s"},
                },
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "backendRefs": [{"group": INFERENCE, "kind": "InferencePool", "name": pool.name}],
                    "timeouts": {"request": "0s"},
                },
            ],
        },
    )  # fmt: skip
    for item in pool.classes:
        if not OBJECT_NAME.fullmatch(item["name"]):
            continue  # no object may have this name
        yield child_metadata.manifest(
            pool, f"{OBJECTIVES}/v1alpha2", "InferenceObjective", f"{pool.name}-{item['name']}", COMPONENT,
            spec={
                "priority": SHEDDABLE if item.get("sheddable") else 0,
                "poolRef": {"group": INFERENCE, "kind": "InferencePool", "name": pool.name},
            },
        )  # fmt: skip


def admitted(pool: spec.Pool, *ports: str) -> list[dict[str, Any]]:
    """The rule of a NetworkPolicy that admits the proxies of the Gateway to these ports; none without a Gateway."""
    api = pool.gateway.api
    if api is None:
        return []
    namespace = api.proxy_namespace or api.parent.get("namespace", pool.namespace)
    peer = {
        "podSelector": {"matchLabels": dict(api.proxy_labels)},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }
    return [{"from": [peer], "ports": [{"port": port} for port in ports]}]
