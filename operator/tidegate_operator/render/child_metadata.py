"""Names, labels and ownership of a pool's children.

A child's name consists of the names of the pool and the node pool. The CRD limits the lengths of both, so that every name
fits in 63 characters.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tidegate_operator import spec

Manifest = dict[str, Any]

GROUP = "tidegate.dev"
VERSION = "v1alpha1"
KIND = "ServingPool"
PLURAL = "servingpools"

MANAGED_BY = "tidegate-operator"
POOL = f"{GROUP}/pool"
NODE_POOL = f"{GROUP}/node-pool"
COMPONENT = "app.kubernetes.io/component"
OWNER = f"{GROUP}/operator"
"""Annotation of a pool: the namespace and the Lease of the operator that owns it. Other operators leave the pool alone."""
CONFIG_DIGEST = f"{GROUP}/config-digest"
PROFILE_DIGEST = f"{GROUP}/profile-digest"
"""Annotation of pods whose profiles are not shipped: what they read of them at their start."""

OPERATOR_SELECTOR = {"app.kubernetes.io/name": "tidegate-operator"}
"""Labels that the chart gives the operator's pod; the NetworkPolicies admit it."""

HTTP_PORT = 8000
GRPC_PORT = 9000
EXT_PROC_PORT = 9002
ADMIN_PORT = 8001
METRICS_PORT = 8002
CONTROL_PORT = 9001


TOKEN_KEY, PASSWORD_KEY = "token", "store-password"
"""Keys of the pool's Secret (`pool_secret`)."""


def secret_name(pool: spec.Pool) -> str:
    """The Secret with the token of the pool and the password of its embedded store."""
    return pool.credentials or f"{pool.name}-credentials"


def secret_variable(pool: spec.Pool, variable: str, key: str) -> Manifest:
    """An environment variable from the pool's Secret. A pod whose Secret or key does not exist does not start."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret_name(pool), "key": key}}}


def component_name(pool: spec.Pool, component: str) -> str:
    return f"{pool.name}-{component}"


def engine_name(pool: spec.Pool, node_pool: str) -> str:
    return f"{pool.name}-engine-{node_pool}"


def selector(pool_name: str, component: str, node_pool: str | None = None) -> dict[str, str]:
    """Labels that select the pods of one component. They never change, because a Deployment's selector is immutable."""
    return {POOL: pool_name, COMPONENT: component, **({NODE_POOL: node_pool} if node_pool else {})}


def manifest(
    pool: spec.Pool,
    api_version: str,
    kind: str,
    name: str,
    component: str,
    *,
    node_pool: str | None = None,
    **body: Any,
) -> Manifest:
    """A complete child: named, labelled, and owned by its pool, so that it is deleted with the pool."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pool.namespace,
            "labels": {
                "app.kubernetes.io/name": f"tidegate-{component}",
                "app.kubernetes.io/instance": pool.name,
                "app.kubernetes.io/part-of": "tidegate",
                "app.kubernetes.io/managed-by": MANAGED_BY,
                **selector(pool.name, component, node_pool),
            },
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": KIND,
                    "name": pool.name,
                    "uid": pool.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        **body,
    }


def service_account(pool: spec.Pool, component: str) -> Manifest:
    """An account without rights, whose pods get no token: no component of a pool talks to the API server."""
    return manifest(
        pool, "v1", "ServiceAccount", component_name(pool, component), component, automountServiceAccountToken=False
    )


def disruption_budget(pool: spec.Pool, name: str, component: str, node_pool: str | None = None) -> Manifest:
    """A drain evicts one pod at a time. `minAvailable: all` would block every drain forever."""
    return manifest(
        pool, "policy/v1", "PodDisruptionBudget", name, component, node_pool=node_pool,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(pool.name, component, node_pool)},
        },
    )  # fmt: skip


def annotated(body: Mapping[str, Any], annotations: Mapping[str, str]) -> Manifest:
    """A copy of a manifest, or of a pod template, with these annotations besides its own."""
    metadata = body["metadata"]
    return {**body, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}


def digest(value: Any) -> str:
    """A short fingerprint of a configuration. Pods that carry it in an annotation restart when it changes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def api_url(pool_name: str, namespace: str, *, tls: bool) -> str:
    """Base address of the OpenAI API of a pool's gateways, inside the cluster."""
    return f"{'https' if tls else 'http'}://{pool_name}-gateway.{namespace}.svc:{HTTP_PORT}/v1"
