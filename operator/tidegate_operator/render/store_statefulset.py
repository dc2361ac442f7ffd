"""The manifests of a pool's embedded Valkey, unless the spec names an existing server.

They are a StatefulSet with one replica, its Service, and a NetworkPolicy that admits only the gateway. Tidegate's image
contains valkey-server. Its password comes from the pool's Secret, as a line of configuration on standard input: arguments
are visible in the list of processes. Every change is in the append-only file within a second. With `storage` the file is on
a volume and survives the pod; without it the file survives only restarts of the container.
"""

from collections.abc import Iterator
from typing import Any

from tidegate_operator import spec
from tidegate_operator.render import child_metadata, default_resources, pods

COMPONENT = "valkey"
PORT = 6379
DATA = "/data"
PARALLEL = "Parallel"
"""With the default of Kubernetes, an edit never reaches a pod that is not ready, so it could not mend a store that does not
start."""
_ARGUMENTS = (
    f"--port {PORT} --protected-mode no --dir {DATA} --appendonly yes --appendfsync everysec "
    "--maxmemory-policy noeviction"
)
_SHELL = """exec valkey-server "$@" - <<END
requirepass $STORE_PASSWORD
END
"""
"""The shell becomes the server, so signals reach it. A password with spaces or an empty one ends the server at once."""


def url(pool: spec.Pool) -> str:
    """The address of the store."""
    return pool.store.url or f"redis://{child_metadata.component_name(pool, COMPONENT)}.{pool.namespace}.svc:{PORT}/0"


def manifests(pool: spec.Pool, *, image: pods.Image, ipv6: bool) -> Iterator[child_metadata.Manifest]:
    if pool.store.url is not None:
        return
    name, selector = child_metadata.component_name(pool, COMPONENT), child_metadata.selector(pool.name, COMPONENT)
    yield child_metadata.service_account(pool, COMPONENT)
    yield child_metadata.manifest(
        pool, "networking.k8s.io/v1", "NetworkPolicy", name, COMPONENT,
        spec={
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": child_metadata.selector(pool.name, "gateway")}}],
                    "ports": [{"port": "valkey"}],
                }
            ],
        },
    )  # fmt: skip
    yield child_metadata.manifest(
        pool, "v1", "Service", name, COMPONENT,
        spec={"clusterIP": "None", "selector": selector, "ports": pods.service_ports({"valkey": PORT})},
    )  # fmt: skip
    yield child_metadata.manifest(
        pool, "apps/v1", "StatefulSet", name, COMPONENT,
        spec={
            "replicas": 1,
            "serviceName": name,
            "podManagementPolicy": PARALLEL,
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {
                    "labels": {"app.kubernetes.io/name": "tidegate-valkey", **selector},
                    **({"annotations": dict(notes)} if (notes := pool.store.placement.annotations) else {}),
                },
                "spec": _pod(pool, image, ipv6=ipv6),
            },
            **({"volumeClaimTemplates": [_claim(*pool.store.storage)]} if pool.store.storage else {}),
        },
    )  # fmt: skip


def beside(manifest: spec.Json, body: spec.Json) -> spec.Json:
    """The manifest for the StatefulSet `body` that exists. Kubernetes rejects another `podManagementPolicy`, so one that an
    earlier version created keeps its own. The manifest is then that of the earlier version: an upgrade writes nothing."""
    given, policy = manifest["spec"], "podManagementPolicy"
    if given.get(policy) == body["spec"].get(policy, "OrderedReady"):
        return manifest
    return {**manifest, "spec": {key: value for key, value in given.items() if key != policy}}


def _pod(pool: spec.Pool, image: pods.Image, *, ipv6: bool) -> dict[str, Any]:
    probe = {"tcpSocket": {"port": "valkey"}, "periodSeconds": 5, "timeoutSeconds": 3}
    container = pods.container(
        "valkey",
        image=image,
        ports={"valkey": PORT},
        command=["/bin/sh", "-c", _SHELL, "valkey"],
        args=["--bind", *(("*", "-::*") if ipv6 else ("0.0.0.0",)), *_ARGUMENTS.split(), "--save", ""],
        env=[child_metadata.secret_variable(pool, "STORE_PASSWORD", child_metadata.PASSWORD_KEY)],
        mounts=[{"name": "data", "mountPath": DATA}],
        resources=default_resources.completed(pool.store.resources, default_resources.STORE),
        readinessProbe=probe,
        livenessProbe={**probe, "failureThreshold": 6},
    )
    return pods.pod(
        [container],
        account=child_metadata.component_name(pool, COMPONENT),
        image=image,
        volumes=[] if pool.store.storage else [{"name": "data", "emptyDir": {}}],
        terminationGracePeriodSeconds=30,
        **pool.store.placement.pod_fields(),
    )


def _claim(size: str, storage_class: str | None) -> dict[str, Any]:
    return {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
            **({"storageClassName": storage_class} if storage_class else {}),
        },
    }
