"""The manifests of a pool's engines.

Each node pool gets a Deployment, a disruption budget, and a headless Service by whose DNS name the gateway finds the
engines. All engines share an account and a NetworkPolicy that admits only the gateway and the operator, because most of
vLLM's endpoints ask for no key. The control port asks for the token in the pool's Secret.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tidegate_control import pool_token
from tidegate_operator import node_pool_spec, quantity, spec
from tidegate_operator.render import (
    accelerators,
    ca_bundle,
    child_metadata,
    engine_profile,
    engine_weights,
    gateway_api,
    pods,
    scraping,
)

COMPONENT = "engine"
PORTS = {"http": child_metadata.HTTP_PORT, "control": child_metadata.CONTROL_PORT}
LEAVE_S = 5
"""Seconds in which a stopping engine still accepts calls, while the gateways learn that it stops."""
PROBE_S = 5


def manifests(
    pool: spec.Pool,
    counts: Mapping[str, int],
    *,
    image_of: Callable[[node_pool_spec.Engine], pods.Image],
    download_image: pods.Image,
    operator_namespace: str,
    prometheus: scraping.Scraping,
    host: str,
) -> Iterator[child_metadata.Manifest]:
    """`host` is the address on which the ports listen."""
    yield child_metadata.service_account(pool, COMPONENT)
    yield _network_policy(pool, operator_namespace, prometheus)
    for node_pool in pool.node_pools:
        name = child_metadata.engine_name(pool, node_pool.name)
        yield prometheus.announced(_service(pool, node_pool, name), child_metadata.HTTP_PORT)
        yield child_metadata.disruption_budget(pool, name, COMPONENT, node_pool.name)
        yield from engine_profile.manifests(pool, node_pool, name, COMPONENT)
        yield _deployment(
            pool, node_pool, name, counts[node_pool.name], image_of(node_pool.engine), download_image, host
        )


def _service(pool: spec.Pool, node_pool: node_pool_spec.NodePool, name: str) -> child_metadata.Manifest:
    return child_metadata.manifest(
        pool, "v1", "Service", name, COMPONENT, node_pool=node_pool.name,
        spec={
            "clusterIP": "None",
            "selector": child_metadata.selector(pool.name, COMPONENT, node_pool.name),
            "ports": pods.service_ports(PORTS),
        },
    )  # fmt: skip


def _deployment(
    pool: spec.Pool,
    node_pool: node_pool_spec.NodePool,
    name: str,
    replicas: int,
    image: pods.Image,
    download_image: pods.Image,
    host: str,
) -> child_metadata.Manifest:
    selector = child_metadata.selector(pool.name, COMPONENT, node_pool.name)
    return child_metadata.manifest(
        pool, "apps/v1", "Deployment", name, COMPONENT, node_pool=node_pool.name,
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": selector},
            # A new engine starts beside the old ones. `rollout` changes this where the cluster has no room for it.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": engine_weights.longest_start_s(pool, node_pool) + spec.START_SLACK_S,
            "template": {
                "metadata": {
                    "labels": {"app.kubernetes.io/name": "tidegate-engine", **selector},
                    "annotations": {**node_pool.engine.placement.annotations, **engine_profile.annotations(node_pool)},
                },
                "spec": _pod(pool, node_pool, image, download_image, host),
            },
        },
    )  # fmt: skip


def _pod(
    pool: spec.Pool, node_pool: node_pool_spec.NodePool, image: pods.Image, download_image: pods.Image, host: str
) -> dict[str, Any]:
    engine, name = node_pool.engine, child_metadata.component_name(pool, COMPONENT)
    weights = engine_weights.NONE if engine.simulated else engine_weights.of(pool, node_pool, download_image)
    listen = _listen(host)
    arguments = _simulated(pool, node_pool, listen) if engine.simulated else _vllm(pool, node_pool, weights, listen)
    container = pods.container(
        "engine",
        image=image,
        ports=PORTS,
        command=list(engine.command) or ["tidegate", "sim-engine" if engine.simulated else "engine"],
        args=[*arguments, *engine.args],
        env=[
            child_metadata.secret_variable(pool, pool_token.VARIABLE, child_metadata.TOKEN_KEY),
            *ca_bundle.env(pool),
            *weights.env,
            *engine.env,
        ],
        mounts=[
            *([] if engine.simulated else [{"name": "shm", "mountPath": "/dev/shm"}]),
            *weights.mounts(),
            *ca_bundle.mounts(pool),
            *engine_profile.mounts(node_pool),
            *engine.volume_mounts,
        ],
        resources=accelerators.resources(node_pool),
        startupProbe=pods.http_probe("/health", period_s=PROBE_S, failures=-(-engine.startup_s // PROBE_S)),
        readinessProbe=pods.http_probe("/health", period_s=PROBE_S),
        livenessProbe=pods.http_probe("/health", period_s=10, failures=6),
        lifecycle={"preStop": {"sleep": {"seconds": LEAVE_S}}},
        **weights.container_fields(),
    )
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": engine.shared_memory}}
    fields = {**accelerators.pod_fields(node_pool), **engine.pod_fields, **weights.pod_fields()}
    if weights.pod_fields() and "imagePullSecrets" in engine.pod_fields:
        more = ({"name": secret} for secret in download_image.pull_secrets)
        fields["imagePullSecrets"] = pods.last_by("name", *engine.pod_fields["imagePullSecrets"], *more)
    return pods.pod(
        [container],
        account=engine.service_account or name,
        image=image,
        volumes=[
            *([] if engine.simulated else [shm]),
            *weights.volumes(),
            *ca_bundle.volumes(pool),
            *engine_profile.volumes(node_pool, child_metadata.engine_name(pool, node_pool.name)),
            *engine.volumes,
        ],
        terminationGracePeriodSeconds=LEAVE_S + engine.drain_s + 10,
        **fields,
    )


def _listen(host: str) -> tuple[str, ...]:
    control = f"[{host}]" if ":" in host else host
    return (
        f"--host={host}",
        f"--port={child_metadata.HTTP_PORT}",
        f"--control={control}:{child_metadata.CONTROL_PORT}",
    )


def _vllm(
    pool: spec.Pool,
    node_pool: node_pool_spec.NodePool,
    weights: engine_weights.EngineWeights,
    listen: Iterable[str],
) -> Iterator[str]:
    """Arguments of `tidegate engine`: --control and the arguments of `vllm serve`."""
    yield from weights.arguments
    yield f"--served-model-name={pool.model.name}"
    yield from listen
    yield f"--tensor-parallel-size={node_pool.tensor_parallel}"
    yield f"--shutdown-timeout={pool.engine.drain_s}"
    # A last limit behind the gateways' own limits: a full engine answers 503, and the gateway tries another one.
    if pool.gateway.max_waiting:
        yield f"--max-num-queued-reqs={pool.gateway.max_waiting}"
    if pool.model.max_model_len is not None:
        yield f"--max-model-len={pool.model.max_model_len}"
    if offload := quantity.number(pool.engine.offload):
        yield f"--kv-offloading-size={float(offload) / 2**30:g}"
    yield from engine_profile.arguments(node_pool)


def _simulated(pool: spec.Pool, node_pool: node_pool_spec.NodePool, listen: Iterable[str]) -> Iterator[str]:
    yield f"--model={pool.model.name}"
    yield from listen
    yield f"--speed={pool.engine.sim_speed:g}"
    yield f"--shutdown-timeout={pool.engine.drain_s}"
    for adapter in node_pool.adapters:
        yield f"--adapter={adapter.name}"
    yield from engine_profile.arguments(node_pool)


def _network_policy(pool: spec.Pool, operator_namespace: str, prometheus: scraping.Scraping) -> child_metadata.Manifest:
    gateway = {"podSelector": {"matchLabels": child_metadata.selector(pool.name, "gateway")}}
    operator = {
        "podSelector": {"matchLabels": child_metadata.OPERATOR_SELECTOR},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
    }
    return child_metadata.manifest(
        pool, "networking.k8s.io/v1", "NetworkPolicy", child_metadata.component_name(pool, COMPONENT), COMPONENT,
        spec={
            "podSelector": {"matchLabels": child_metadata.selector(pool.name, COMPONENT)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [gateway], "ports": [{"port": "http"}, {"port": "control"}]},
                {"from": [operator], "ports": [{"port": "control"}]},
                *gateway_api.admitted(pool, "http"),
                *prometheus.admitted("http"),
            ],
        },
    )  # fmt: skip
