"""The manifests of a pool's engines.

Each node pool gets a Deployment, a disruption budget, and a headless Service by whose DNS name the gateway finds the
engines. All engines share an account and a NetworkPolicy that admits only the gateway and the operator, because most of
vLLM's endpoints ask for no key. The control port asks for the token in the pool's Secret.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tidegate_control import pool_token
from tidegate_operator import spec
from tidegate_operator.render import child_metadata, pods, scraping

COMPONENT = "engine"
PORTS = {"http": child_metadata.HTTP_PORT, "control": child_metadata.CONTROL_PORT}
LEAVE_S = 5
"""Seconds in which a stopping engine still accepts calls, while the gateways learn that it stops."""
PROBE_S = 5


def manifests(
    pool: spec.Pool,
    counts: Mapping[str, int],
    *,
    image: pods.Image,
    operator_namespace: str,
    prometheus: scraping.Scraping,
) -> Iterator[child_metadata.Manifest]:
    yield child_metadata.service_account(pool, COMPONENT)
    yield _network_policy(pool, operator_namespace, prometheus)
    for node_pool in pool.node_pools:
        name = child_metadata.engine_name(pool, node_pool.name)
        yield prometheus.announced(_service(pool, node_pool, name), child_metadata.HTTP_PORT)
        yield child_metadata.disruption_budget(pool, name, COMPONENT, node_pool.name)
        yield _deployment(pool, node_pool, name, counts[node_pool.name], image)


def _service(pool: spec.Pool, node_pool: spec.NodePool, name: str) -> child_metadata.Manifest:
    return child_metadata.manifest(
        pool, "v1", "Service", name, COMPONENT, node_pool=node_pool.name,
        spec={
            "clusterIP": "None",
            "selector": child_metadata.selector(pool.name, COMPONENT, node_pool.name),
            "ports": pods.service_ports(PORTS),
        },
    )  # fmt: skip


def _deployment(
    pool: spec.Pool, node_pool: spec.NodePool, name: str, replicas: int, image: pods.Image
) -> child_metadata.Manifest:
    selector = child_metadata.selector(pool.name, COMPONENT, node_pool.name)
    return child_metadata.manifest(
        pool, "apps/v1", "Deployment", name, COMPONENT, node_pool=node_pool.name,
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": selector},
            # A new engine starts beside the old ones. `rollout` changes this where the cluster has no room for it.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "progressDeadlineSeconds": pool.engine.startup_s + 300,
            "template": {
                "metadata": {
                    "labels": {"app.kubernetes.io/name": "tidegate-engine", **selector},
                    "annotations": dict(pool.engine.pod_annotations),
                },
                "spec": _pod(pool, node_pool, image),
            },
        },
    )  # fmt: skip


def _pod(pool: spec.Pool, node_pool: spec.NodePool, image: pods.Image) -> dict[str, Any]:
    engine = pool.engine
    container = pods.container(
        "engine",
        image=image,
        ports=PORTS,
        command=list(engine.command) or ["tidegate", "sim-engine" if engine.simulated else "engine"],
        args=[
            *(_simulated(pool, node_pool) if engine.simulated else _vllm(pool, node_pool)),
            *engine.args,
            *node_pool.args,
        ],
        env=[child_metadata.secret_variable(pool, pool_token.VARIABLE, child_metadata.TOKEN_KEY), *engine.env],
        mounts=[
            *([] if engine.simulated else [{"name": "shm", "mountPath": "/dev/shm"}]),
            *engine.volume_mounts,
        ],
        resources=_resources(engine.resources, node_pool),
        startupProbe=pods.http_probe("/health", period_s=PROBE_S, failures=-(-engine.startup_s // PROBE_S)),
        readinessProbe=pods.http_probe("/health", period_s=PROBE_S),
        livenessProbe=pods.http_probe("/health", period_s=10, failures=6),
        lifecycle={"preStop": {"sleep": {"seconds": LEAVE_S}}},
    )
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": engine.shared_memory}}
    node_selector = {
        **({"nvidia.com/gpu.product": node_pool.accelerator} if node_pool.accelerator and node_pool.gpus else {}),
        **engine.node_selector,
        **node_pool.node_selector,
    }
    claims = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": node_pool.claim_template}]}
    return pods.pod(
        [container],
        account=child_metadata.component_name(pool, COMPONENT),
        image=image,
        volumes=[*([] if engine.simulated else [shm]), *engine.volumes],
        nodeSelector=node_selector,
        tolerations=[*engine.tolerations, *node_pool.tolerations],
        terminationGracePeriodSeconds=LEAVE_S + engine.drain_s + 10,
        **(claims if node_pool.claim_template else {}),
        **engine.pod_fields,
    )


def _resources(given: spec.Json, node_pool: spec.NodePool) -> dict[str, Any]:
    if node_pool.claim_template:
        return {**given, "claims": [{"name": "gpu"}]}
    if not node_pool.gpus:
        return dict(given)
    return {**given, "limits": {**given.get("limits", {}), "nvidia.com/gpu": str(node_pool.gpus)}}


def _vllm(pool: spec.Pool, node_pool: spec.NodePool) -> Iterator[str]:
    """Arguments of `tidegate engine`: --control and the arguments of `vllm serve`."""
    yield f"--model={_weights(pool.model)}"
    yield f"--served-model-name={pool.model.name}"
    yield "--host=0.0.0.0"
    yield f"--port={child_metadata.HTTP_PORT}"
    yield f"--control=0.0.0.0:{child_metadata.CONTROL_PORT}"
    yield f"--tensor-parallel-size={node_pool.tensor_parallel}"
    yield f"--shutdown-timeout={pool.engine.drain_s}"
    # A last limit behind the gateways' own limits: a full engine answers 503, and the gateway tries another one.
    if pool.gateway.max_waiting:
        yield f"--max-num-queued-reqs={pool.gateway.max_waiting}"
    if pool.model.max_model_len is not None:
        yield f"--max-model-len={pool.model.max_model_len}"
    if pool.engine.offload_gib:
        yield f"--kv-offloading-size={pool.engine.offload_gib}"
    if node_pool.profile:
        yield f"--profile={node_pool.profile}"


def _weights(model: spec.Model) -> str:
    return (model.uri or model.name).removeprefix("hf://").removeprefix("file://")


def _simulated(pool: spec.Pool, node_pool: spec.NodePool) -> Iterator[str]:
    yield f"--model={pool.model.name}"
    yield "--host=0.0.0.0"
    yield f"--port={child_metadata.HTTP_PORT}"
    yield f"--control=0.0.0.0:{child_metadata.CONTROL_PORT}"
    yield f"--speed={pool.engine.sim_speed:g}"
    yield f"--shutdown-timeout={pool.engine.drain_s}"
    if node_pool.profile:
        yield f"--profile={node_pool.profile}"


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
                *prometheus.admitted("http"),
            ],
        },
    )  # fmt: skip
