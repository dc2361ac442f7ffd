"""How the weights of a model and of its adapters reach the engines of a node pool: volumes, mounts, and what runs before
the engine.

Weights that are downloaded into a cache come by an init container, which is `tidegate weights` in the image of gateways,
so engine images need nothing for it. The engine then reads the copy, and never writes to the volume. The init container
requests the CPU and the memory of the engine, so a pod that is Guaranteed stays so. A kubelet pulls, keeps and checks
images (`oci://`) by itself. Without a cache vLLM downloads from the hub, to the pod's own disk.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_operator import node_pool_spec, spec
from tidegate_operator.render import ca_bundle, default_resources, pods
from tidegate_operator.weights import weight_source

CONTAINER, ADAPTER = "weights", "adapter-"
"""Name of the init container; what those of adapters begin with."""
VOLUME, FOLDER = "tidegate-weights", "/weights"
REPORT = "/dev/termination-log"
MOST_IN_A_STEP = 4
"""Adapters whose calls vLLM runs in one step (--max-loras), unless the engine's arguments say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Weights in a pod."""

    path: str
    """Where the engine reads them; a name for vLLM to resolve if nothing is mounted."""
    volume: Mapping[str, Any] | None = None
    mount: Mapping[str, Any] | None = None
    """Of the engine."""
    init_container: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeights:
    """What the weights add to the pod of an engine."""

    arguments: tuple[str, ...] = ()
    """Of vLLM."""
    env: Sequence[Mapping[str, Any]] = ()
    variables_of: str | None = None
    """Secret whose keys become variables of the engine."""
    copies: Sequence[Copy] = ()

    def volumes(self) -> list[Mapping[str, Any]]:
        return _by_name(copy.volume for copy in self.copies)

    def mounts(self) -> list[Mapping[str, Any]]:
        return _by_name(copy.mount for copy in self.copies)

    def container_fields(self) -> dict[str, Any]:
        return _variables_of(self.variables_of)

    def pod_fields(self) -> dict[str, Any]:
        found = [copy.init_container for copy in self.copies if copy.init_container is not None]
        return {"initContainers": found} if found else {}


NONE = EngineWeights()


def longest_start_s(pool: spec.Pool, node_pool: node_pool_spec.NodePool) -> int:
    """Seconds in which an engine of the node pool must serve, with the download of its weights."""
    downloads = pool.model.cache if is_downloaded(pool, node_pool) else None
    return pool.engine.startup_s + (downloads.download_s if downloads else 0)


def is_downloaded(pool: spec.Pool, node_pool: node_pool_spec.NodePool) -> bool:
    """Whether the pods of the node pool download weights into a cache before their engines start."""
    return any(source is not None and _is_cached(pool, node_pool, source) for source in _sources(node_pool))


def is_download(container: str) -> bool:
    """Whether an init container of an engine downloads weights, by its name."""
    return container == CONTAINER or container.startswith(ADAPTER)


def of(pool: spec.Pool, node_pool: node_pool_spec.NodePool, image: pods.Image) -> EngineWeights:
    """`image` is that of the download."""
    source, model = node_pool.weights, pool.model
    resolved = [one for one in _sources(node_pool) if _is_resolved_by_vllm(pool, node_pool, one)]
    adapters = [
        _copy(pool, node_pool, adapter.weights, image, name=f"{ADAPTER}{number}", folder=f"/adapters/{number}")
        for number, adapter in enumerate(node_pool.adapters)
    ]
    copies = adapters
    if source is None:
        arguments: tuple[str, ...] = (f"--model={model.name}",)
    elif source in resolved:
        revisions = (f"--revision={source.detail}",) if source.detail != weight_source.DEFAULT_REVISION else ()
        arguments = (f"--model={source.location}", *revisions)
    else:
        weights = _copy(pool, node_pool, source, image, name=CONTAINER, folder=FOLDER)
        arguments, copies = (f"--model={weights.path}",), [weights, *adapters]
    return EngineWeights(
        arguments=(*arguments, *_loras(pool, node_pool, [copy.path for copy in adapters])),
        env=[{"name": "HF_ENDPOINT", "value": model.endpoint}] if resolved and model.endpoint else (),
        variables_of=model.secret if resolved else None,
        copies=copies,
    )


def _sources(node_pool: node_pool_spec.NodePool) -> list[weight_source.Source | None]:
    return [node_pool.weights, *(adapter.weights for adapter in node_pool.adapters)]


def _is_resolved_by_vllm(
    pool: spec.Pool, node_pool: node_pool_spec.NodePool, source: weight_source.Source | None
) -> bool:
    """Whether vLLM gets the weights from the hub."""
    return source is None or (source.scheme == "hf" and not _is_cached(pool, node_pool, source))


def _is_cached(pool: spec.Pool, node_pool: node_pool_spec.NodePool, source: weight_source.Source) -> bool:
    comes_from_afar = source.scheme in weight_source.DOWNLOADED
    return comes_from_afar and pool.model.cache is not None and not node_pool.engine.simulated


def _variables_of(secret: str | None) -> dict[str, Any]:
    return {"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}


def _by_name(items: Iterable[Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    """Each item once. Copies in a cache share its volume."""
    return list({item["name"]: item for item in items if item is not None}.values())


def _loras(pool: spec.Pool, node_pool: node_pool_spec.NodePool, paths: Sequence[str]) -> tuple[str, ...]:
    """Each adapter in JSON, the only form in which a path may have any character."""
    if not paths:
        return ()
    modules = [
        json.dumps({"name": adapter.name, "path": path, "base_model_name": pool.model.name})
        for adapter, path in zip(node_pool.adapters, paths, strict=True)
    ]
    return ("--enable-lora", f"--max-loras={min(len(paths), MOST_IN_A_STEP)}", "--lora-modules", *modules)


def _copy(
    pool: spec.Pool,
    node_pool: node_pool_spec.NodePool,
    source: weight_source.Source,
    image: pods.Image,
    *,
    name: str,
    folder: str,
) -> Copy:
    """The weights of `source`, at `folder` in the engine unless they are in the cache."""
    if _is_cached(pool, node_pool, source):
        return _cached(pool, node_pool, source, image, name=name)
    if source.scheme in ("hf", "file"):
        return Copy(path=source.location)
    volumes: Mapping[str, Mapping[str, Any]] = {
        "pvc": {"persistentVolumeClaim": {"claimName": source.location, "readOnly": True}},
        "oci": {"image": {"reference": source.location}},
        "hostpath": {"hostPath": {"path": source.location, "type": "Directory"}},
    }
    volume = f"tidegate-{name}"
    return Copy(
        path=f"{folder}/{source.detail}".rstrip("/"),
        volume={"name": volume, **volumes[source.scheme]},
        mount={"name": volume, "mountPath": folder, "readOnly": True},
    )


def _cached(
    pool: spec.Pool,
    node_pool: node_pool_spec.NodePool,
    source: weight_source.Source,
    image: pods.Image,
    *,
    name: str,
) -> Copy:
    model, cache = pool.model, pool.model.cache
    assert cache is not None
    container = pods.container(
        name,
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
        resources=default_resources.completed(node_pool.engine.resources, default_resources.DOWNLOAD),
        terminationMessagePolicy="FallbackToLogsOnError",
        **_variables_of(model.secret),
    )
    claim = {"persistentVolumeClaim": {"claimName": cache.claim}}
    folder = {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    return Copy(
        path=f"{FOLDER}/{source.folder(model.endpoint)}",
        volume={"name": VOLUME, **(folder if cache.claim is None else claim)},
        mount={"name": VOLUME, "mountPath": FOLDER, "readOnly": True},
        init_container=container,
    )
