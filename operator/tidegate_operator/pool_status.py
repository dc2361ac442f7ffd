"""The status of a pool: its conditions, counts and events, computed from the objects that exist.

Pure. Several writers share a pool's status by server-side apply, and each states its own part: `reconcile` (counts,
Available, Ready, Progressing, Degraded, CallersAuthenticated), `pool_steering` (active policy, attainment, and the last
three conditions), `pool_scaling` and `pool_canary`. So none overwrites another.

    Available     calls are served: at least one engine, one gateway and the store are ready, or the autoscaler starts the
                  first engine for the calls that wait
    Ready         every part runs as the spec asks
    Progressing   a change is being rolled out
    Degraded      a person must act: the spec cannot be built, an object was rejected, pods do not start, a revision of
                  the engines did not serve, or the store does not answer
    CallersAuthenticated  the gateways ask callers for a key or a token
    PolicyStable  the scheduling policy has stayed for its dwell (`steering_status`)
    ReportsCredible  the steering loop believes the reports of all engines (`steering_status`)
    StoreReachable  the gateways reach the store (`store_status`)
"""

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tidegate_operator import pod_trouble
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: bool | None
    """None: it is unknown."""
    reason: str
    """One CamelCase word."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A Kubernetes event of a pool, as `kubectl describe` shows it."""

    namespace: str
    pool: str
    uid: str
    reason: str
    message: str
    at: str
    """RFC 3339. The same event at the same instant is the same object, so posting it twice has the effect of posting it
    once. `reconcile` records an event after the status that it tells of: an operator that dies between the two leaves the
    event out."""
    warning: bool = False

    def manifest(self, *, controller: str, instance: str) -> Json:
        key = child_metadata.digest([self.uid, self.reason, self.message, self.at])
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{self.pool}.{key}", "namespace": self.namespace},
            "eventTime": self.at,
            "reportingController": f"{child_metadata.GROUP}/{controller}",
            "reportingInstance": instance[:128],
            "action": self.reason,
            "reason": self.reason,
            "note": self.message[:1024],
            "type": "Warning" if self.warning else "Normal",
            "regarding": {
                "apiVersion": f"{child_metadata.GROUP}/{child_metadata.VERSION}",
                "kind": child_metadata.KIND,
                "namespace": self.namespace,
                "name": self.pool,
                "uid": self.uid,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment or StatefulSet as its controller last reported it."""

    name: str
    component: str
    node_pool: str | None
    desired: int
    ready: int
    existing: int
    settled: bool
    """Every desired pod is ready and of the newest template, and no other pod is left. Never while a canary is held
    (`canary_hold`)."""
    short: bool
    """The controller has seen the newest spec and reports other pods than `settled` asks for. A workload of which the
    controller has not seen the newest spec yet is neither settled nor short. Every write of an annotation to a Deployment
    makes such a moment, because it raises the generation."""
    stuck: str | None
    """Why its controller could not make progress when it last reported, if so."""
    rejected: str | None
    """Why the API server rejects pods of the newest spec, for example for a quota. None while the controller has not seen
    that spec: an earlier spec may have asked for more."""
    overdue: str | None
    """Why the change to the newest spec is over its deadline. None while the controller has not seen that spec."""

    @staticmethod
    def of(body: Json) -> "Workload":
        spec, seen, tags = body["spec"], body.get("status", {}), body["metadata"]["labels"]
        desired = spec.get("replicas", 1)
        counts = [seen.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas")]
        current = seen.get("observedGeneration", 0) >= body["metadata"]["generation"]
        complete = counts == [desired] * 3 and not spec.get("minReadySeconds")
        rejections, deadlines = _sentences(seen.get("conditions", ()))
        return Workload(
            name=body["metadata"]["name"],
            component=tags.get(child_metadata.COMPONENT, ""),
            node_pool=tags.get(child_metadata.NODE_POOL),
            desired=desired,
            ready=seen.get("readyReplicas", 0),
            existing=seen.get("replicas", 0),
            settled=current and complete,
            short=current and not complete,
            stuck=next(iter([*rejections, *deadlines]), None),
            rejected=next(iter(rejections), None) if current else None,
            overdue=next(iter(deadlines), None) if current else None,
        )


def _sentences(conditions: Iterable[Json]) -> tuple[list[str], list[str]]:
    """Why pods are rejected, and why a roll-out is over its deadline, as the conditions of a workload say."""
    rejections, deadlines = [], []
    for condition in conditions:
        if is_rejection(condition):
            rejections.append(condition.get("message", "its pods cannot be created"))
        if condition["type"] == "Progressing" and condition["status"] == "False":
            deadlines.append(condition.get("message", "its roll-out makes no progress"))
    return rejections, deadlines


def is_rejection(condition: Json) -> bool:
    """Whether a condition of a workload says that the API server rejects its pods."""
    return bool(condition["type"] == "ReplicaFailure" and condition["status"] == "True")


def workloads(children: Iterable[Json]) -> list[Workload]:
    return [
        Workload.of(body)
        for body in children
        if body["kind"] in ("Deployment", "StatefulSet") and "deletionTimestamp" not in body["metadata"]
    ]


def troubles_of(parts: Iterable[Workload], pods: Iterable[Json]) -> list[pod_trouble.PodTrouble]:
    """The troubles of the pods, without those of pods that have failed and whose workload has all that it wants."""
    whole = {(part.component, part.node_pool) for part in parts if part.settled}
    return [
        found
        for pod in pods
        if not (pod_trouble.has_failed(pod) and _workload_of(pod) in whole)
        if (found := pod_trouble.of(pod)) is not None
    ]


def _workload_of(pod: Json) -> tuple[str | None, str | None]:
    tags = pod["metadata"].get("labels", {})
    return tags.get(child_metadata.COMPONENT), tags.get(child_metadata.NODE_POOL)


NOTHING_WAITS: Mapping[str, str] = MappingProxyType({})
NO_WEIGHTS: Mapping[str, Json] = MappingProxyType({})
STORE = "StoreReachable"
"""The condition in which gateways tell of the store."""
UNREACHABLE = "Unreachable"
"""Its reason while no gateway reaches the store."""
AUTOSCALING = "Autoscaling"
"""The condition of the pool's own autoscaler."""
UNSCHEDULABLE = "Unschedulable"
"""Its reason while the cluster has no room for engines."""
INVALID_SPEC = "InvalidSpec"
SILENT = "GatewaysSilent"
DECIDES_NOTHING = (INVALID_SPEC, SILENT)
"""With these reasons of the condition Autoscaling the number of engines stays as it is."""
AVAILABLE = "Available"
AT_ZERO = "ScaledToZero"
STARTING, NOT_STARTING = "Starting", "NotStarting"
SERVING: Mapping[str, str] = MappingProxyType(
    {
        "True": "Engines, gateways and the store serve.",
        "False": "Engines and gateways serve. Some gateways do not reach the store, as StoreReachable says.",
        "Unknown": "Engines and gateways are ready. Whether the store serves is not known, as StoreReachable says.",
    }
)
"""By the status of StoreReachable: what is known of a pool that is available."""
FROM_ZERO = (AT_ZERO, STARTING, NOT_STARTING)
"""Reasons of the condition Available of a pool that has had no engine since the autoscaler stopped its last one."""
EMBEDDED_STORE = "valkey"
"""The component of a store that the operator runs."""
WITHOUT_PICKERS: Mapping[str, str] = MappingProxyType(
    {
        "FailOpen": "The Gateway sends requests to engines without a decision (gateway.api.failureMode: FailOpen): no key "
        "is checked, and no limit, share or deadline holds. Requests of workflows and relQueries fail.",
        "FailClose": "The Gateway refuses the requests of clients with an error (gateway.api.failureMode: FailClose).",
    }
)
"""By failure mode: what happens to the traffic of a Gateway of the cluster while no gateway of the pool, which are its
endpoint pickers, is ready."""
LOOK_AT_GATEWAYS = (
    "Progressing and Degraded say why the gateways are not ready. Correct that, and set gateway.replicas to 2 or more."
)
MOST_SENTENCES = 5
"""Sentences of pods in one message."""
AUTHENTICATED = "CallersAuthenticated"
"""The condition that tells whether the spec lets every caller in."""
TROUBLE_S = 15.0
"""Age from which the trouble of a pod or of the store makes the pool degraded. A shorter one is usual while pods start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a pool needs to serve calls, apart from what exists of it."""

    components: tuple[str, ...]
    """Those of which at least one part must be ready."""
    autoscaled: bool
    """Whether the pool's own autoscaler starts an engine for the first call of a pool that has none."""
    store: Json
    """The condition StoreReachable as it stands in the status; empty without one."""
    autoscaling: str = ""
    """The reason of the condition Autoscaling as it stands in the status; empty without one."""
    available: str = ""
    """The reason of the condition Available as it stands in the status; empty without one."""
    failure_mode: str | None = None
    """FailOpen or FailClose where a Gateway of the cluster sends calls to the pool (`gateway.api`), else None."""

    @staticmethod
    def of(body: Json) -> "Needs":
        """The needs of a ServingPool."""
        spec = body["spec"]
        embedded = "url" not in spec.get("state", {}).get("valkey", {})
        stated = {item["type"]: item for item in body.get("status", {}).get("conditions", ())}
        return Needs(
            components=("engine", "gateway", *((EMBEDDED_STORE,) if embedded else ())),
            autoscaled=any(item.get("scaledBy") == "autoscaler" for item in spec["nodePools"]),
            store=stated.get(STORE, {}),
            autoscaling=stated.get(AUTOSCALING, {}).get("reason", ""),
            available=stated.get(AVAILABLE, {}).get("reason", ""),
            failure_mode=spec.get("gateway", {}).get("api", {}).get("failureMode"),
        )

    def lacks_store_s(self, now: datetime.datetime) -> float | None:
        """For how long a gateway has not reached the store; None while all that tell of it do."""
        return age_s(self.store["lastTransitionTime"], now) if self.store.get("status") == "False" else None


def conditions(
    parts: Sequence[Workload],
    problems: Sequence[tuple[str, str]],
    pods: Iterable[Json] = (),
    *,
    needs: Needs,
    waiting: Mapping[str, str] = NOTHING_WAITS,
    now: datetime.datetime,
) -> list[Condition]:
    """The conditions that `reconcile` states. `problems` are (reason, message) pairs of the obstacles to the spec.
    `waiting` tells for what parts wait: for their turn to change, or for the readiness of the others."""
    every_pod = list(pods)
    unsettled = [part for part in parts if not part.settled]
    troubles = [each for each in troubles_of(parts, every_pod) if age_s(each.since, now) >= each.usual_s]
    old = {(each.reason, each.message): each for each in troubles if age_s(each.since, now) >= TROUBLE_S}
    first = sorted(old.values(), key=lambda each: each.sentence)[:MOST_SENTENCES]
    trouble = [
        *problems,
        *(("Stuck", f"{part.name}: {part.stuck}") for part in parts if part.stuck),
        *((each.condition, each.sentence) for each in first),
        *([("StoreUnreachable", needs.store["message"])] if (needs.lacks_store_s(now) or 0.0) >= TROUBLE_S else []),
    ]
    progress = "; ".join(
        [
            *(f"{part.name} has {part.ready} of {part.desired} ready" for part in unsettled),
            *(f"{name} {what}" for name, what in sorted(waiting.items())),
            *sorted({each.sentence for each in troubles})[:MOST_SENTENCES],
        ]
    )
    summary = "; ".join(message for _, message in trouble)
    if problems:
        ready = Condition(type="Ready", status=False, reason=problems[0][0], message=summary)
    elif unsettled or waiting:
        ready = Condition(type="Ready", status=False, reason="Waiting", message=progress)
    else:
        ready = Condition(type="Ready", status=True, reason="Ready", message="Every part runs as the spec asks.")
    return [
        _availability(parts, every_pod, needs, now),
        ready,
        Condition(type="Progressing", status=True, reason="RollingOut", message=progress)
        if unsettled or waiting
        else Condition(type="Progressing", status=False, reason="Settled", message="No change is being rolled out."),
        Condition(type="Degraded", status=True, reason=trouble[0][0], message=summary)
        if trouble
        else Condition(type="Degraded", status=False, reason="AsExpected", message="No person needs to act."),
    ]


def _may_serve(part: Workload, pods: Iterable[Json], now: datetime.datetime) -> bool:
    """Whether engines of a node pool start, and nothing is known that keeps them from it."""
    own = [pod for pod in pods if _workload_of(pod) == (part.component, part.node_pool)]
    ages_s = ((age_s(each.since, now), each.usual_s) for each in troubles_of([part], own))
    return bool(part.desired) and not part.stuck and not any(age >= max(usual, TROUBLE_S) for age, usual in ages_s)


def _availability(parts: Sequence[Workload], pods: Sequence[Json], needs: Needs, now: datetime.datetime) -> Condition:
    missing = [name for name in needs.components if not any(part.ready for part in parts if part.component == name)]
    engines = [part for part in parts if part.node_pool]
    if not parts:
        return Condition(type=AVAILABLE, status=False, reason="NothingRuns", message="No part of the pool exists.")
    if needs.autoscaled and missing == ["engine"] and engines and not any(part.desired for part in engines):
        if needs.autoscaling in DECIDES_NOTHING:
            message = f"No engine runs, and none starts while the condition Autoscaling is {needs.autoscaling}."
            return Condition(type=AVAILABLE, status=False, reason="NotServing", message=message)
        message = "No engine runs. The first call starts one, and waits for it."
        if needs.autoscaling == UNSCHEDULABLE:
            message += (
                " The cluster had no room for further engines, as Autoscaling says, so the call may wait in vain."
            )
        return Condition(type=AVAILABLE, status=True, reason=AT_ZERO, message=message)
    if needs.autoscaled and missing == ["engine"] and engines and needs.available in FROM_ZERO:
        if any(_may_serve(part, pods, now) for part in engines):
            message = "The first engine starts. Calls wait for it."
            return Condition(type=AVAILABLE, status=True, reason=STARTING, message=message)
        message = "No engine is ready, and the first one does not start, as Progressing and Degraded say."
        return Condition(type=AVAILABLE, status=False, reason=NOT_STARTING, message=message)
    if missing:
        sentences = [f"No {' and '.join(missing)} is ready."]
        if "gateway" in missing and needs.failure_mode is not None:
            sentences += [WITHOUT_PICKERS[needs.failure_mode], LOOK_AT_GATEWAYS]
        return Condition(type=AVAILABLE, status=False, reason="NotServing", message=" ".join(sentences))
    if needs.store.get("reason") == UNREACHABLE:
        return Condition(type=AVAILABLE, status=False, reason="NotServing", message=needs.store["message"])
    message = SERVING.get(needs.store.get("status", "Unknown"), SERVING["Unknown"])
    return Condition(type=AVAILABLE, status=True, reason="Serving", message=message)


def authentication(body: Json, *, valid: bool) -> Condition:
    """Whether the gateways of the ServingPool `body` ask callers for a key or a token; unknown without a valid spec."""
    given = body["spec"].get("gateway", {}).get("auth", {})
    if not valid:
        message = "The gateways follow the last valid spec."
        return Condition(type=AUTHENTICATED, status=None, reason=INVALID_SPEC, message=message)
    if "keysSecretRef" in given or "jwt" in given:
        message = "Callers need a key or a token, as spec.gateway.auth says."
        return Condition(type=AUTHENTICATED, status=True, reason="KeysOrTokens", message=message)
    message = (
        "The gateways serve callers without authentication, because spec.gateway.auth has neither keysSecretRef nor jwt."
        " Set one of these fields, or let a proxy in front of the gateways authenticate callers."
    )
    return Condition(type=AUTHENTICATED, status=False, reason="Unauthenticated", message=message)


def invalid_spec(condition: str, effect: str) -> Condition:
    """A condition of which nothing is known while the spec cannot be built. `effect` is a sentence."""
    message = f"The spec is invalid, as Degraded says. {effect}"
    return Condition(type=condition, status=None, reason=INVALID_SPEC, message=message)


def age_s(since: str, now: datetime.datetime) -> float:
    """Seconds since an instant as Kubernetes writes it; 0 for a text that is none."""
    try:
        return (now - datetime.datetime.fromisoformat(since)).total_seconds()
    except (TypeError, ValueError):  # without a time zone, or no instant
        return 0.0


def timed(stated: Iterable[Condition], previous: Iterable[Json], *, generation: int, now: str) -> list[dict[str, Any]]:
    """`stated` in the form of the API: each condition with the instant of the last change of its status."""
    before = {item["type"]: item for item in previous}
    result = []
    for condition in stated:
        value = "Unknown" if condition.status is None else str(condition.status)
        old = before.get(condition.type, {})
        result.append(
            {
                "type": condition.type,
                "status": value,
                "reason": condition.reason,
                "message": condition.message[:32768],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == value else now,
            }
        )
    return result


def of_reconcile(
    body: Json,
    parts: Sequence[Workload],
    stated: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Json] = NO_WEIGHTS,
) -> dict[str, Any]:
    """The part of the status of the ServingPool `body` that `reconcile` writes. `weights` is the result of
    `weight_status.of_pods`."""
    metadata, spec = body["metadata"], body["spec"]
    engines = sorted((part for part in parts if part.node_pool), key=lambda part: str(part.node_pool))
    gateways = [part for part in parts if part.component == "gateway"]
    counted = [item["name"] for item in spec["nodePools"] if item.get("scaledBy", "pool") == "pool"]
    tls = "secretName" in spec.get("gateway", {}).get("tls", {})
    return {
        "observedGeneration": metadata["generation"],
        "model": spec["model"]["name"],
        "url": child_metadata.api_url(metadata["name"], metadata["namespace"], tls=tls),
        "gateways": _counts(gateways),
        "conditions": list(stated),
        "replicas": sum(part.existing for part in engines if not counted or part.node_pool in counted),
        "selector": _selector(metadata["name"], counted if len(counted) < len(spec["nodePools"]) else ()),
        "engines": _counts(engines),
        "nodePools": [
            {
                "name": part.node_pool,
                "desired": part.desired,
                "ready": part.ready,
                **({"weights": found} if (found := weights.get(str(part.node_pool))) else {}),
            }
            for part in engines
        ],
    }


def _selector(pool: str, node_pools: Sequence[str]) -> str:
    """The label selector of the engines that `spec.replicas` counts: those of the whole pool, or of some node pools."""
    whole = ",".join(f"{key}={value}" for key, value in child_metadata.selector(pool, "engine").items())
    return f"{whole},{child_metadata.NODE_POOL} in ({','.join(sorted(node_pools))})" if node_pools else whole


def _counts(parts: Iterable[Workload]) -> str:
    counts = [(part.ready, part.desired) for part in parts]
    return f"{sum(ready for ready, _ in counts)}/{sum(desired for _, desired in counts)}"


def changed(previous: Json, stated: Json, *, owns: Collection[str]) -> bool:
    """Whether writing `stated` over `previous` would change anything. Both writers have entries in the same lists; the
    entries are matched by type or name. `owns` names the optional fields of this writer, at the top or in entries:
    such a field is removed when it is no longer stated."""
    return any(key in previous and key not in stated for key in owns) or any(
        _entries_differ(previous.get(key, ()), value, owns) if isinstance(value, list) else previous.get(key) != value
        for key, value in stated.items()
    )


def _entries_differ(old: Iterable[Json], new: Iterable[Json], owns: Collection[str]) -> bool:
    before, after = ({item.get("type") or item["name"]: item for item in items} for items in (old, new))
    return any(changed(before.get(key, {}), after.get(key, {}), owns=owns) for key in before | after)
