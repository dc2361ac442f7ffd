"""How a Deployment keeps one engine of a new revision beside the old ones, and which revision is under test?

Pure. Kubernetes replaces no further pod while the new one is not *available*, so a canary has a `minReadySeconds` of a
year: its pod is ready and serves, and the Deployment waits. The decision about the revision stands in `status.rollout`
(`pool_canary` writes it). Promotion takes `minReadySeconds` away, and the Deployment goes on. Its progress deadline is
longer by the same year until it has gone on.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_operator import objects
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json
from tidegate_policy.rollout import canary

REVISION = f"{child_metadata.GROUP}/revision"
"""Annotation of a workload and of its pods: the digest of the pod template."""
SERVED = f"{child_metadata.GROUP}/served"
"""Annotation: the last revision of which all engines served, as JSON with the keys `revision` and `template`."""
ADOPTED = "adopted"
"""The revision of a workload, and of its pods, that an operator without revisions created."""
HELD_S = 365 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """A revision that replaces another one that served."""

    node_pool: str
    revision: str


def noted(annotations: Mapping[str, str], key: str) -> dict[str, Any]:
    """The JSON object in an annotation; empty without one."""
    try:
        found = json.loads(annotations.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def revision_of(body: Json) -> str:
    """The revision of a workload or of a pod."""
    revision: str = body["metadata"].get("annotations", {}).get(REVISION, ADOPTED)
    return revision


def replaces(revision: str, annotations: Mapping[str, str]) -> bool:
    """Whether the revision replaces another one that served, according to the annotations of its Deployment."""
    return noted(annotations, SERVED).get("revision") not in (None, revision)


def under_test(pool: Json, children: Iterable[Json]) -> Tested | None:
    """The revision that is tested now; None if there is none, or if the pool has no canary."""
    found = [tested for tested, body in _replacing(pool, children) if body["spec"].get("replicas")]
    return min(found, key=lambda each: each.node_pool, default=None)


def awaits_engines(pool: Json, children: Iterable[Json]) -> bool:
    """Whether a revision was promoted and has not served everywhere, because its node pool has no engines now. The decision
    then stays in the status, so that the revision is not tested again when its node pool has engines again."""
    return any(
        not body["spec"].get("replicas") and decision(pool, tested.revision).get("phase") == canary.Phase.PROMOTED
        for tested, body in _replacing(pool, children)
    )


def _replacing(pool: Json, children: Iterable[Json]) -> Iterator[tuple[Tested, Json]]:
    """The Deployments of engines whose revision replaces another one that served, if the pool has a canary."""
    if "canary" not in pool["spec"].get("rollout", {}):
        return
    uid = pool["metadata"]["uid"]
    for body in children:
        metadata = body["metadata"]
        node_pool = metadata["labels"].get(child_metadata.NODE_POOL)
        if body["kind"] != "Deployment" or node_pool is None or objects.controller_uid(body) != uid:
            continue
        notes = metadata.get("annotations", {})
        if REVISION in notes and replaces(notes[REVISION], notes):
            yield Tested(node_pool=node_pool, revision=notes[REVISION]), body


def decision(pool: Json, revision: str) -> Json:
    """What `status.rollout` says of the revision; empty when it says nothing."""
    stated: Json = pool.get("status", {}).get("rollout", {})
    return stated if "canary" in pool["spec"].get("rollout", {}) and stated.get("revision") == revision else {}


def fields(pool: Json, revision: str, progress_s: int, observed: Json) -> dict[str, Any]:
    """The fields of the Deployment `observed` whose `revision` replaces another one. `progress_s` is its own progress
    deadline, which would end while the canary is held."""
    asked = pool["spec"].get("rollout", {})
    longer = {"progressDeadlineSeconds": HELD_S + progress_s}
    if "canary" in asked and decision(pool, revision).get("phase") != canary.Phase.PROMOTED:
        return {**longer, "minReadySeconds": HELD_S}
    found = {} if _has_gone_on(observed) else longer
    return {**found, "paused": True} if asked.get("paused") else found


def _has_gone_on(body: Json) -> bool:
    """Whether the Deployment has made progress since its canary was let go, or had none. The time of its progress deadline
    counts from its last progress, and that is as old as the canary until the new engine is available."""
    spec, seen = body["spec"], body.get("status", {})
    if spec.get("minReadySeconds"):
        return False
    if spec.get("progressDeadlineSeconds", 0) < HELD_S:
        return True
    replicas, updated, ready, available = (
        seen.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    )
    is_current = seen.get("observedGeneration", 0) >= body["metadata"]["generation"]
    has_new = ready > replicas - updated  # an engine of the new revision is ready
    return bool(is_current and has_new and available == ready)


def sentence(pool: Json, revision: str) -> str | None:
    """What a person is told of a Deployment whose `revision` replaces another one; None if it is replaced as usual."""
    asked, stated = pool["spec"].get("rollout", {}), decision(pool, revision)
    paused = "; paused by spec.rollout.paused" if asked.get("paused") else ""
    if "canary" in asked and stated.get("phase") != canary.Phase.PROMOTED:
        return f"tests a new revision: {stated.get('reason', 'its first engine is being created')}{paused}"
    return "is paused by spec.rollout.paused" if paused else None


def failure(pool: Json, revision: str) -> str | None:
    """Why the revision failed its test; None if it did not."""
    stated = decision(pool, revision)
    return stated["reason"] if stated.get("phase") == canary.Phase.FAILED else None
