"""Translates `spec.engine` and `spec.nodePools` into one frozen value for each node pool.

A node pool has the settings of `spec.engine` with its own on top: lists are joined, resources, labels and annotations are
joined by name, and every other field of the node pool replaces that of the engine. Of variables with the same name,
`render.pods` keeps the last.
"""

import math
from dataclasses import dataclass
from typing import Any

from tidegate_operator import pod_placement
from tidegate_operator.own_profile import OwnProfile
from tidegate_operator.pod_placement import Json
from tidegate_operator.weights import weight_source
from tidegate_policy import duration

DEVICE = "nvidia.com/gpu"
"""The resource of which an engine requests its devices, unless the node pool names another one."""
PRODUCT_LABELS = {
    "nvidia.com/": "nvidia.com/gpu.product",
    "amd.com/": "amd.com/gpu.product-name",
    "gpu.intel.com/": "gpu.intel.com/product",
    "google.com/tpu": "cloud.google.com/gke-tpu-accelerator",
}
"""By the beginning of a resource's name: the node label that names the product, as its vendor's discovery writes it. A rule
of `crds/` requires `acceleratorLabel` for other resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The settings of an engine's pod."""

    simulated: bool
    sim_speed: float
    image: str | None
    """None selects the operator's default image for this kind of engine."""
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[Json, ...]
    resources: Json
    offload: str
    """Quantity."""
    shared_memory: str
    """Quantity."""
    startup_s: int
    drain_s: int
    placement: pod_placement.Placement
    volumes: tuple[Json, ...]
    volume_mounts: tuple[Json, ...]
    service_account: str | None
    """None selects an account without rights."""
    pod_fields: Json
    """Copied to the pod unchanged: imagePullSecrets, runtimeClassName."""
    pull_policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators of one engine."""

    count: int
    resource: str
    products: tuple[str, ...]
    """A node must have one of them; empty for any node."""
    label: str
    """Node label that names the product."""
    claim_template: str | None
    """ResourceClaimTemplate that supplies the devices in place of `resource`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter of the model."""

    name: str
    """In requests."""
    weights: weight_source.Source


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    name: str
    replicas: int
    min_replicas: int
    max_replicas: int | None
    external: bool
    """Whether an autoscaler of its Deployment sets the number of its engines."""
    autoscaled: bool
    """Whether the pool's own autoscaler sets it."""
    tensor_parallel: int
    devices: Devices
    cost_weight: float
    profile: str | None
    own_profile: OwnProfile | None
    """The profile, if the ConfigMap that the spec names has it; None for a shipped one."""
    weights: weight_source.Source | None
    """None lets vLLM resolve the model's name."""
    adapters: tuple[Adapter, ...]
    """Those that its engines load."""
    engine: Engine
    """`spec.engine` with the node pool's own settings on top."""

    @property
    def engine_cost(self) -> float:
        """Relative cost of one engine, by which `replica_allocation` ranks node pools."""
        return max(self.devices.count, 1) * self.cost_weight


def engine(item: Json) -> Engine:
    """The engine that `item`, in the form of `spec.engine`, describes."""
    return Engine(
        simulated=item["kind"] == "sim",
        sim_speed=float(item.get("simSpeed", 1)),
        image=item.get("image"),
        command=tuple(item.get("command", ())),
        args=tuple(item.get("args", ())),
        env=tuple(item.get("env", ())),
        resources=item.get("resources", {}),
        # An earlier version stored offloadGiB.
        offload=str(item.get("offload", f"{item.get('offloadGiB', 0)}Gi")),
        shared_memory=str(item["sharedMemory"]),
        startup_s=math.ceil(duration.seconds(item["startupTimeout"])),
        drain_s=math.ceil(duration.seconds(item["drainTimeout"])),
        placement=pod_placement.Placement.of(item),
        volumes=tuple(item.get("volumes", ())),
        volume_mounts=tuple(item.get("volumeMounts", ())),
        service_account=item.get("serviceAccountName"),
        pod_fields={name: item[name] for name in ("imagePullSecrets", "runtimeClassName") if name in item},
        pull_policy=item.get("imagePullPolicy"),
    )


def node_pool(item: Json, common: Json, model: Json, own: OwnProfile | None = None) -> NodePool:
    """The node pool `item`. `common` is `spec.engine`, and `model` is `spec.model`. `own` is its profile, unless that is a
    shipped one."""
    simulated, uri = common["kind"] == "sim", item.get("uri", model.get("uri"))
    return NodePool(
        name=item["name"],
        replicas=item["replicas"],
        min_replicas=item["minReplicas"],
        max_replicas=item.get("maxReplicas"),
        external=item["scaledBy"] == "external",
        autoscaled=item["scaledBy"] == "autoscaler",
        tensor_parallel=item["tensorParallel"],
        devices=devices(item, simulated=simulated),
        cost_weight=float(item["costWeight"]),
        profile=item.get("profile"),
        own_profile=own,
        weights=None if uri is None else weight_source.parse(uri),
        adapters=_adapters(item, model),
        engine=engine(_overridden(common, item)),
    )


def _adapters(item: Json, model: Json) -> tuple[Adapter, ...]:
    declared = model.get("adapters", ())
    chosen = item.get("adapters", [adapter["name"] for adapter in declared])
    return tuple(
        Adapter(name=adapter["name"], weights=weight_source.parse(adapter["uri"]))
        for adapter in declared
        if adapter["name"] in chosen
    )


def devices(item: Json, *, simulated: bool) -> Devices:
    """The accelerators of an engine of the node pool `item`."""
    resource = item.get("acceleratorResource", DEVICE)
    known = next((label for start, label in PRODUCT_LABELS.items() if resource.startswith(start)), "")
    return Devices(
        count=item.get("gpus", 0 if simulated else item["tensorParallel"]),
        resource=resource,
        products=tuple(item["accelerators"]) if "accelerators" in item else _one(item.get("accelerator")),
        label=item.get("acceleratorLabel", known),
        claim_template=item.get("resourceClaimTemplateName"),
    )


def _one(product: str | None) -> tuple[str, ...]:
    return () if product is None else (product,)


def _overridden(common: Json, own: Json) -> Json:
    """`spec.engine` with the settings of a node pool on top."""
    replaced = ("image", "affinity", "priorityClassName", "runtimeClassName", "serviceAccountName")
    joined: dict[str, Any] = {name: own[name] for name in replaced if name in own}
    for name in ("args", "tolerations", "env"):
        joined[name] = [*common.get(name, ()), *own.get(name, ())]
    for name in ("nodeSelector", "podAnnotations"):
        joined[name] = {**common.get(name, {}), **own.get(name, {})}
    given, further = common.get("resources", {}), own.get("resources", {})
    joined["resources"] = {kind: {**given.get(kind, {}), **further.get(kind, {})} for kind in {**given, **further}}
    return {**common, **joined}
