"""Can a new engine take the place of an old one? From the specs of their pods.

Pure. Where the cluster has no room for one more engine, `rollout` stops an old one first. That helps only if the new pod
asks for no more than the old one frees, and may run wherever the old one ran. An edit that no node can hold stops nothing.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from tidegate_operator import canary_hold, pod_trouble, quantity
from tidegate_operator.spec import Json

IN_PLACE = {"maxSurge": 0, "maxUnavailable": 1}
"""The strategy of a node pool in which an old engine stops before a new one starts."""
SAME = {"runtimeClassName": "", "schedulerName": "default-scheduler"}
"""Fields of a pod that decide where it may run, with their defaults. A new pod must have those of the old one."""
SAME_OR_NONE = ("affinity", "topologySpreadConstraints", "resourceClaims")
"""Such fields that restrict nothing when they are absent."""
ADMITTED = "node.kubernetes.io/"
"""Keys of the tolerations that the API server adds to every pod."""

Amounts = Mapping[str, Decimal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What a new engine asks for that finds no room."""

    spec: Json
    """Of its pod."""
    lacking: Container[str] | None = None
    """The resources of which some node has too little now; None = it may be any."""
    limits: bool = False
    """Whether the limits count too, as they do for a quota."""

    def obstacles(self, old: Json) -> Iterator[str]:
        """Why it may find no room where a pod of the spec `old` stops: a clause for each reason."""
        return obstacles(self.spec, old, lacking=self.lacking, limits=self.limits)


def without_room(pods: Iterable[Json], *, revision: str, rejected: Json | None) -> list[Asks]:
    """The new engines of `revision` that find no room. `pods` are those of the node pool, and `rejected` is the spec of the
    pods that a quota rejects, if one does."""
    found = [
        Asks(spec=pod["spec"], lacking=trouble.lacks)
        for pod in pods
        if canary_hold.revision_of(pod) == revision and (trouble := pod_trouble.of(pod)) and trouble.lacks
    ]
    return found if rejected is None else [*found, Asks(spec=rejected, limits=True)]


def obstacle(pods: Iterable[Json], *, revision: str, served: str | None, rejected: Json | None) -> str | None:
    """Why stopping an engine makes no room for one of `revision`; None if it does. `pods` and `rejected` are as for
    `without_room`, and `served` is the last revision that served."""
    every = list(pods)
    # An engine of a revision that never served may stop, unless it serves now.
    old = [
        pod["spec"]
        for pod in every
        if (its := canary_hold.revision_of(pod)) != revision
        and pod_trouble.has_place(pod)
        and (its == served or pod_trouble.is_ready(pod))
    ]
    new = without_room(every, revision=revision, rejected=rejected)
    return next((why for each in new for freed in old for why in each.obstacles(freed)), None)


def obstacles(new: Json, old: Json, *, lacking: Container[str] | None = None, limits: bool = False) -> Iterator[str]:
    """Why a pod of the spec `new` may find no room where one of the spec `old` stops: a clause for each reason.

    `lacking` has the resources of which some node has too little now; None = it may be any. With `limits` the limits count
    too, as they do for a quota.
    """
    for what in ("requests", "limits") if limits else ("requests",):
        freed = amounts(old, what)
        for name, wanted in sorted(amounts(new, what).items()):
            is_scarce = lacking is None or name in lacking
            if is_scarce and wanted > (given := freed.get(name, Decimal(0))):
                yield f"its {what} have {quantity.text(wanted)} {name}, those of an old engine {quantity.text(given)}"
    if not new.get("nodeSelector", {}).items() <= old.get("nodeSelector", {}).items():
        yield "its nodeSelector differs"
    if not all(item in new.get("tolerations", ()) for item in _own_tolerations(old)):
        yield "its tolerations differ"
    if _volume_claims(new) - _volume_claims(old):
        yield "its volumes differ"
    for name in SAME_OR_NONE:
        if new.get(name) and new[name] != old.get(name):
            yield f"its {name} differs"
    for name, default in SAME.items():
        if new.get(name, default) != old.get(name, default):
            yield f"its {name} differs"


def amounts(spec: Json, what: str) -> Amounts:
    """What a pod takes of each resource, as the scheduler counts: all containers together, or the greatest init container
    if it takes more. A container without a request for a resource requests its limit."""
    beside: Amounts = {}  # of init containers that go on beside the others
    peak: Amounts = {}
    for container in spec.get("initContainers", ()):
        own = _of_container(container, what)
        if container.get("restartPolicy") == "Always":
            beside = _sum(beside, own)
            peak = _greater(peak, beside)
        else:
            peak = _greater(peak, _sum(beside, own))
    together = beside
    for container in spec.get("containers", ()):
        together = _sum(together, _of_container(container, what))
    whole = {**_greater(together, peak), **_of_container(spec, what)}  # the resources of the pod itself come first
    return _sum(whole, _numbers(spec.get("overhead", {})))


def _of_container(container: Json, what: str) -> Amounts:
    resources = container.get("resources", {})
    stated = {**resources.get("limits", {}), **resources.get("requests", {})}
    return _numbers(stated if what == "requests" else resources.get("limits", {}))


def _numbers(quantities: Mapping[str, object]) -> Amounts:
    return {name: quantity.number(value) or Decimal(0) for name, value in quantities.items()}


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in one.keys() | other.keys()}


def _greater(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in one.keys() | other.keys()}


def _own_tolerations(spec: Json) -> Iterator[Json]:
    return (item for item in spec.get("tolerations", ()) if not item.get("key", "").startswith(ADMITTED))


def _volume_claims(spec: Json) -> set[str]:
    """The PersistentVolumeClaims of a pod, which bind it to the nodes that reach their volumes."""
    volumes = spec.get("volumes", ())
    return {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}
