"""How the weights of a node pool reach its engines: a volume, a mount, and what runs before the engine.

Weights that are downloaded into a cache come by an init container, which is `tidegate weights` in the image of gateways,
so engine images need nothing for it. The engine then reads the copy, and never writes to the volume. The init container
requests the CPU and the memory of the engine, so a pod that is Guaranteed stays so. A kubelet pulls, keeps and checks
images (`oci://`) by itself. Without a cache vLLM downloads from the hub, to the pod's own disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_operator import node_pool_spec, spec
from tidegate_operator.render import ca_bundle, pods
from tidegate_operator.weights import weight_source

CONTAINER = "weights"
"""Name of the init container."""
VOLUME, FOLDER = "tidegate-weights", "/weights"
REPORT = "/dev/termination-log"
_SMALL = {"requests": {"cpu": "500m", "memory": "512Mi"}}
"""Resources of the download where the engine has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeights:
    """What the weights add to the pod of an engine."""

    arguments: tuple[str, ...] = ()
    """Of vLLM."""
    env: Sequence[Mapping[str, Any]] = ()
    variables_of: str | None = None
    """Secret whose keys become variables of the engine."""
    volume: Mapping[str, Any] | None = None
    """The source of the volume that the engine mounts at `FOLDER`."""
    init_containers: Sequence[Mapping[str, Any]] = ()

    def volumes(self) -> list[dict[str, Any]]:
        return [{"name": VOLUME, **self.volume}] if self.volume else []

    def mounts(self) -> list[dict[str, Any]]:
        return [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}] if self.volume else []

    def container_fields(self) -> dict[str, Any]:
        return _variables_of(self.variables_of)

    def pod_fields(self) -> dict[str, Any]:
        return {"initContainers": list(self.init_containers)} if self.init_containers else {}


NONE = EngineWeights()


def is_downloaded(pool: spec.Pool, node_pool: node_pool_spec.NodePool) -> bool:
    """Whether the pods of the node pool download weights into a cache before their engines start."""
    source = node_pool.weights
    comes_from_afar = source is not None and source.scheme in weight_source.DOWNLOADED
    return comes_from_afar and pool.model.cache is not None and not node_pool.engine.simulated


def of(pool: spec.Pool, node_pool: node_pool_spec.NodePool, image: pods.Image) -> EngineWeights:
    """`image` is that of the download."""
    source, model = node_pool.weights, pool.model
    if source is None:
        return _by_vllm(model.name, "", model)
    if is_downloaded(pool, node_pool):
        return _cached(pool, node_pool, source, image)
    if source.scheme == "hf":
        return _by_vllm(source.location, source.detail, model)
    if source.scheme == "file":
        return EngineWeights(arguments=(f"--model={source.location}",))
    volumes: Mapping[str, Mapping[str, Any]] = {
        "pvc": {"persistentVolumeClaim": {"claimName": source.location, "readOnly": True}},
        "oci": {"image": {"reference": source.location}},
        "hostpath": {"hostPath": {"path": source.location, "type": "Directory"}},
    }
    return EngineWeights(arguments=(_model(source.detail),), volume=volumes[source.scheme])


def _variables_of(secret: str | None) -> dict[str, Any]:
    return {"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}


def _model(folder: str) -> str:
    return f"--model={FOLDER}/{folder}".rstrip("/")


def _by_vllm(name: str, revision: str, model: spec.Model) -> EngineWeights:
    revisions = (f"--revision={revision}",) if revision not in ("", weight_source.DEFAULT_REVISION) else ()
    env = [{"name": "HF_ENDPOINT", "value": model.endpoint}] if model.endpoint else []
    return EngineWeights(arguments=(f"--model={name}", *revisions), env=env, variables_of=model.secret)


def _cached(
    pool: spec.Pool, node_pool: node_pool_spec.NodePool, source: weight_source.Source, image: pods.Image
) -> EngineWeights:
    model, cache = pool.model, pool.model.cache
    assert cache is not None
    container = pods.container(
        CONTAINER,
        image=image,
        ports={},
        command=["tidegate", "weights"],
        args=[
            source.uri,
            f"--cache={FOLDER}",
            f"--report={REPORT}",
            *([f"--endpoint={model.endpoint}"] if model.endpoint else []),
        ],
        env=ca_bundle.env(pool),
        mounts=[{"name": VOLUME, "mountPath": FOLDER}, *ca_bundle.mounts(pool)],
        resources=dict(node_pool.engine.resources) or _SMALL,
        terminationMessagePolicy="FallbackToLogsOnError",
        **_variables_of(model.secret),
    )
    claim = {"persistentVolumeClaim": {"claimName": cache.claim}}
    folder = {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    return EngineWeights(
        arguments=(_model(source.folder(model.endpoint)),),
        volume=folder if cache.claim is None else claim,
        init_containers=[container],
    )
