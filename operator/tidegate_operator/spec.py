"""Translates the body of a ServingPool, as the API server stores it, into one frozen value.

The schema and the CEL rules of `crds/` have filled in the defaults and rejected most mistakes; `spec_problems` finds the
rest. `node_pool_spec` translates the engines. `replica_allocation` then divides them among the node pools, and `render`
turns the value into manifests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate_operator import node_pool_spec, own_profile, pod_placement, quantity, spec_problems
from tidegate_policy import duration, policies
from tidegate_policy.admit import entitlements
from tidegate_policy.rollout import canary, side_by_side
from tidegate_policy.scale import autoscaler

Json = pod_placement.Json
"""A piece of a Kubernetes object."""


START_SLACK_S = 300
"""Time beyond `engine.startupTimeout` in which a new engine must serve: for its node, its image and its volumes."""
HOLD, SCHEDULING = "30m", "5m"
"""What holds where the spec says nothing of `autoscaling.holdCalls` and `autoscaling.schedulingTimeout`."""


class InvalidSpecError(ValueError):
    """The spec cannot be built; `problems` names each field to change."""

    def __init__(self, problems: Sequence[spec_problems.Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The volume that keeps weights. One of `claim` and `host_path` is None."""

    claim: str | None
    host_path: str | None
    download_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    secret: str | None
    """Name of the Secret with the credentials of the weights, as variables."""
    endpoint: str | None
    """Mirror of the Hugging Face hub, or S3-compatible store."""
    cache: Cache | None
    """None leaves downloads to vLLM."""
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayApi:
    """The Gateway of the cluster that sends calls to the pool."""

    parent: Mapping[str, str]
    """The parentRef of the HTTPRoute."""
    hostnames: tuple[str, ...]
    failure_mode: str
    """FailOpen or FailClose: what the Gateway does without the pool's gateways."""
    proxy_namespace: str | None
    """Of the pods that carry the Gateway's calls; None = the namespace of the Gateway."""
    proxy_labels: Mapping[str, str]
    """Of these pods; empty = all pods of the namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    replicas: int
    image: str | None
    service_type: str
    service_annotations: Json
    resources: Json
    placement: pod_placement.Placement
    rule: str
    """The dispatch rule, which chooses an engine for a call."""
    alpha: float | None
    """Weight of an engine's speed against its load; None selects the gateway's default."""
    beta: float
    """Scale of an engine's load, in seconds squared."""
    traces_to: str | None
    """OTLP collector over gRPC; None sends no spans."""
    drain_s: int
    max_waiting: int
    ttl_s: float
    default_class: str | None
    keys_secret: tuple[str, str] | None
    """Name of the Secret that holds the file of API keys, and the key in it; None = there are no API keys."""
    jwt: Mapping[str, str] | None
    """`auth.jwt` of the gateway's settings; None = no tokens are taken. With neither, every client may call."""
    api: GatewayApi | None
    """None = clients connect to the pool's gateways themselves."""
    tls_secret: str | None
    """Name of the Secret with the certificate of the client ports; None selects plain text."""
    further: Mapping[str, Any]
    """Settings that the spec sets beyond the gateway's defaults, as the gateway's settings file has them. A pool that sets
    none has none, so a new default of the gateway restarts nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    url: str | None
    """None selects an embedded Valkey for this pool."""
    secret: tuple[str, str] | None
    """Name of the Secret that holds the password, and the key in it."""
    storage: tuple[str, str | None] | None
    """Size and StorageClass of the embedded Valkey's volume; None selects the disk of its node."""
    placement: pod_placement.Placement
    """Of the embedded Valkey."""
    resources: Json
    """Of the embedded Valkey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """The model that the selector `llm` asks."""

    url: str | None
    """None selects the pool's own gateways."""
    name: str | None
    """None selects the pool's own model."""
    timeout_s: float
    secret: tuple[str, str] | None
    """Name of the Secret that holds the API key, and the key in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    fixed: str | None
    """The policy that the spec fixes; None lets the steering loop decide."""
    allow: tuple[str, ...]
    interval_s: float
    dwell_s: float
    rollback_window_s: float
    rollback_rho: float
    selector: str
    """Name of the selector (`tidegate_policy.steer.selectors`) that proposes policies."""
    llm: LanguageModel
    parameters: Mapping[str, Mapping[str, float]]
    """By policy: the parameters that the spec sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """How the pool's own autoscaler scales the node pools that it may scale."""

    settings: autoscaler.ScaleSettings
    hold_s: float
    """Longest wait of a call without a deadline for the first engine."""
    scheduling_s: float
    """Time after which an engine that no node takes counts as impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How new revisions of engines replace old ones."""

    paused: bool
    canary: canary.CanarySettings | None
    """None lets a revision go on as soon as its first engine serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: str
    namespace: str
    uid: str
    generation: int
    model: Model
    replicas: int | None
    """Total number of engines; None selects the number of each node pool."""
    engine: node_pool_spec.Engine
    """What all node pools have in common."""
    node_pools: tuple[node_pool_spec.NodePool, ...]
    gateway: Gateway
    store: Store
    ca_bundle: tuple[str, str] | None
    """Name of the ConfigMap with the certificates of trusted authorities, and the key in it; None: the images' own."""
    credentials: str | None
    """Name of an existing Secret with the token of the pool; None selects one that the operator creates."""
    steering: Steering
    autoscaling: Autoscaling
    rollout: Rollout
    wanted: Mapping[str, int]
    """The last decision of the pool's own autoscaler, which stands in the status: engines by node pool. A node pool that
    another autoscaler scales is absent."""
    has_decision: bool
    """Whether the pool's own autoscaler has decided before."""
    classes: tuple[Json, ...]
    """Classes, tenants and workflows are copies of the spec with weights as numbers: the gateway reads the same keys."""
    tenants: tuple[Json, ...]
    workflows: tuple[Json, ...]

    @property
    def is_autoscaled(self) -> bool:
        """Whether the pool's own autoscaler scales some node pool."""
        return any(each.autoscaled for each in self.node_pools)

    @property
    def class_names(self) -> frozenset[str]:
        """The names of `classes`."""
        return frozenset(item["name"] for item in self.classes)


NO_PROFILES = own_profile.OwnProfiles()


def parse(body: Json, known: spec_problems.Known, profiles: own_profile.OwnProfiles = NO_PROFILES) -> Pool:
    """The pool that `body` describes. `profiles` are those of its node pools that are not shipped. Raises InvalidSpecError
    with every problem found."""
    try:
        return _parse(body, known, profiles)
    except KeyError as error:
        raise InvalidSpecError([spec_problems.outdated_resource(str(error.args[0]))]) from error


def _parse(body: Json, known: spec_problems.Known, profiles: own_profile.OwnProfiles) -> Pool:
    spec = body["spec"]
    if problems := list(spec_problems.find(spec, known, profiles)):
        raise InvalidSpecError(problems)
    metadata = body["metadata"]
    return Pool(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        model=_model(spec["model"]),
        replicas=spec.get("replicas"),
        engine=node_pool_spec.engine(spec["engine"]),
        node_pools=tuple(
            node_pool_spec.node_pool(item, spec["engine"], spec["model"], profiles.usable.get(item["name"]))
            for item in spec["nodePools"]
        ),
        gateway=_gateway(spec["gateway"]),
        store=_store(spec["state"]["valkey"]),
        ca_bundle=_ca_bundle(spec.get("caBundle")),
        credentials=spec.get("credentials", {}).get("secretName"),
        steering=_steering(spec["policy"]),
        autoscaling=_autoscaling(spec.get("autoscaling", {})),
        rollout=_rollout(spec),
        wanted={
            item["name"]: item["wanted"] for item in body.get("status", {}).get("nodePools", ()) if "wanted" in item
        },
        has_decision="autoscaling" in body.get("status", {}),
        classes=tuple(map(_class, spec.get("classes", ()))),
        tenants=tuple(map(_weighted, spec.get("tenants", ()))),
        workflows=tuple(spec.get("workflows", ())),
    )


def _model(item: Json) -> Model:
    cache = item.get("cache")
    return Model(
        name=item["name"],
        secret=item.get("secretRef", {}).get("name"),
        endpoint=item.get("endpoint"),
        cache=cache
        and Cache(
            claim=cache.get("claimName"),
            host_path=cache.get("hostPath"),
            download_s=_whole_seconds(cache["downloadTimeout"]),
        ),
        max_model_len=item.get("maxModelLen"),
    )


def _gateway(item: Json) -> Gateway:
    alpha = item["dispatch"]["alpha"]
    return Gateway(
        replicas=item["replicas"],
        image=item.get("image"),
        service_type=item["serviceType"],
        service_annotations=item.get("serviceAnnotations", {}),
        resources=item["resources"],
        placement=pod_placement.Placement.of(item),
        rule=item["dispatch"]["rule"],
        alpha=None if alpha == "auto" else _decimal(alpha),
        beta=_decimal(item["dispatch"]["beta"]),
        traces_to=item.get("tracing", {}).get("endpoint"),
        drain_s=_whole_seconds(item["drainTimeout"]),
        max_waiting=item["queue"]["maxRequests"],
        ttl_s=duration.seconds(item["queue"]["ttl"]),
        default_class=item.get("defaultClass"),
        keys_secret=_secret(item.get("auth", {}).get("keysSecretRef")),
        jwt=item.get("auth", {}).get("jwt"),
        api=_gateway_api(item["api"]) if "api" in item else None,
        tls_secret=item.get("tls", {}).get("secretName"),
        further=_further(item),
    )


def _gateway_api(item: Json) -> GatewayApi:
    proxies = item.get("proxies", {})
    return GatewayApi(
        parent=item["parentRef"],
        hostnames=tuple(item.get("hostnames", ())),
        failure_mode=item["failureMode"],
        proxy_namespace=proxies.get("namespace"),
        proxy_labels=proxies.get("podLabels", {}),
    )


def _further(item: Json) -> dict[str, Any]:
    limits = dict(item.get("limits", {}))
    if (size := limits.pop("body", None)) is not None:
        limits["bodyBytes"] = int(quantity.number(size) or 0)
    learnt = {name: item["dispatch"][name] for name in ("learnCosts", "isolateTenants") if name in item["dispatch"]}
    groups = {
        "dispatch": learnt,
        "timeouts": item.get("timeouts"),
        "limits": limits,
        "allow": item.get("allow"),
        "relqueries": item.get("relQueries"),
    }
    return {name: value for name, value in groups.items() if value}


def _decimal(value: Any) -> float:
    """A number that the spec has as an integer or as a decimal string; `spec_problems` has checked it."""
    return float(value)


def _whole_seconds(text: str) -> int:
    return math.ceil(duration.seconds(text))


def _class(item: Json) -> Json:
    """The settings of a class. Gateways of earlier versions do not know `objective`, so the default is left out."""
    objective = _decimal(item["objective"])
    changed = {"objective": objective} if objective != entitlements.OBJECTIVE else {}
    return {**{key: value for key, value in _weighted(item).items() if key != "objective"}, **changed}


def _weighted(item: Json) -> Json:
    return {**item, "weight": _decimal(item["weight"])}


def _secret(reference: Json | None) -> tuple[str, str] | None:
    """Name and key of a reference to a Secret."""
    return None if reference is None else (reference["name"], reference["key"])


def _ca_bundle(item: Json | None) -> tuple[str, str] | None:
    return None if item is None else (item["configMapName"], item["key"])


def _store(item: Json) -> Store:
    storage = item.get("storage")
    return Store(
        url=item.get("url"),
        secret=_secret(item.get("secretRef")),
        storage=(storage["size"], storage.get("className")) if storage else None,
        placement=pod_placement.Placement.of(item),
        resources=item.get("resources", {}),
    )


def _steering(item: Json) -> Steering:
    return Steering(
        fixed=item.get("name"),
        allow=tuple(dict.fromkeys([*item["allow"], policies.SAFE])),
        interval_s=duration.seconds(item["interval"]),
        dwell_s=duration.seconds(item["dwell"]),
        rollback_window_s=duration.seconds(item["rollback"]["window"]),
        rollback_rho=_decimal(item["rollback"]["rho"]),
        selector=item["selector"],
        llm=_language_model(item.get("llm", {})),
        parameters=_parameters(item.get("parameters", ())),
    )


def _autoscaling(item: Json) -> Autoscaling:
    """The group has no default in the custom resource, so that pools that do not use it are stored as before."""
    default = autoscaler.ScaleSettings()
    return Autoscaling(
        settings=autoscaler.ScaleSettings(
            stabilisation_s=duration.seconds(item.get("stabilizationWindow", f"{default.stabilisation_s:g}s")),
            zero_after_s=duration.seconds(item.get("idleAfter", f"{default.zero_after_s:g}s")),
            changes_an_hour=item.get("changesPerHour", default.changes_an_hour),
        ),
        hold_s=duration.seconds(item.get("holdCalls", HOLD)),
        scheduling_s=duration.seconds(item.get("schedulingTimeout", SCHEDULING)),
    )


def _rollout(spec: Json) -> Rollout:
    """The group has no default in the custom resource, so that pools that do not use it are stored as before."""
    item = spec.get("rollout", {})
    if "canary" not in item:
        return Rollout(paused=item.get("paused", False), canary=None)
    return Rollout(paused=item.get("paused", False), canary=_canary(item["canary"]))


def _canary(item: Json) -> canary.CanarySettings:
    default = side_by_side.Limits()
    named = {
        "error_share": ("maxErrorPercent", default.error_share),
        "ttft_ratio": ("maxTtftPercent", default.ttft_ratio),
        "tpot_ratio": ("maxTpotPercent", default.tpot_ratio),
        "attainment_drop": ("maxMissedPercent", default.attainment_drop),
    }
    shares = {name: item[field] / 100 if field in item else value for name, (field, value) in named.items()}
    return canary.CanarySettings(
        steps=tuple(
            canary.Step(weight=each["weight"], duration_s=duration.seconds(each["duration"])) for each in item["steps"]
        ),
        limits=side_by_side.Limits(min_calls=item.get("minCalls", default.min_calls), **shares),
    )


def _language_model(item: Json) -> LanguageModel:
    """The fields have no defaults where the custom resource definition is older than the operator."""
    return LanguageModel(
        url=item.get("url"),
        name=item.get("model"),
        timeout_s=duration.seconds(item.get("timeout", "5s")),
        secret=_secret(item.get("keySecretRef")),
    )


def _parameters(items: Sequence[Json]) -> dict[str, dict[str, float]]:
    parameters: dict[str, dict[str, float]] = {}
    for item in items:
        parameters.setdefault(item["policy"], {})[item["name"]] = float(item["value"])
    return parameters
