"""Which writes turn the objects that exist into the desired ones?

Pure: manifests and observed objects in, steps out. Once the steps are carried out, there are no further steps. `reconcile`
carries them out, and `pool_status` reports the progress.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidegate_operator import objects, pool_status, quantity
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json

APPLIED = f"{child_metadata.GROUP}/applied"
"""Annotation with the digest of the manifest last applied. It reveals that a manifest has lost a field, which server-side
apply must then withdraw."""

MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Fields with a list to which others may add items that server-side apply leaves there, and what names an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    apply: tuple[Json, ...]
    delete: tuple[tuple[objects.Reference, str], ...]
    """References and uids of children that are no longer desired; they are deleted once the pool `can_spare` them."""
    taken: tuple[objects.Reference, ...]
    """Desired names that objects of other owners have; such objects are never touched."""


NOTHING = Steps(apply=(), delete=(), taken=())


def steps(owner: str, desired: Iterable[Json], observed: Iterable[Json]) -> Steps:
    """The steps from `observed` to `desired`, for the pool with the uid `owner`.

    Applies come in the order of `desired`, deletions after them.
    """
    wanted = {objects.Reference.of(manifest): _stamped(manifest) for manifest in desired}
    existing = {objects.Reference.of(body): body for body in observed}
    ours = {reference for reference, body in existing.items() if objects.controller_uid(body) == owner}
    taken = [reference for reference in wanted if reference in existing and reference not in ours]
    return Steps(
        apply=tuple(
            manifest
            for reference, manifest in wanted.items()
            if reference not in taken and not _is_so(manifest, existing.get(reference))
        ),
        delete=tuple(
            (reference, existing[reference]["metadata"]["uid"])
            for reference in existing
            if reference in ours and reference not in wanted and not _is_being_deleted(existing[reference])
        ),
        taken=tuple(taken),
    )


def can_spare(desired: Iterable[Json], current: Iterable[Json]) -> bool:
    """Whether children that are no longer desired may be deleted: every desired engine and gateway runs as `desired`
    says, or no engine is desired.

    So the engines of a renamed node pool serve until their successors are ready and every gateway knows the successors.
    """
    wanted = [manifest for manifest in desired if manifest["kind"] == "Deployment"]
    if not any(item["spec"]["replicas"] for item in wanted if child_metadata.NODE_POOL in item["metadata"]["labels"]):
        return True
    seen = {objects.Reference.of(body): body for body in current}
    found = [seen.get(objects.Reference.of(manifest)) for manifest in wanted]
    return all(
        body is not None and not _is_being_deleted(body) and pool_status.Workload.of(body).settled for body in found
    )


def _stamped(manifest: Json) -> Json:
    """The number of engines is no part of the digest: another scaler's change of it must not lead to a write."""
    spec = manifest.get("spec", {})
    counted = {**manifest, "spec": {**spec, "replicas": None}} if "replicas" in spec else manifest
    return child_metadata.annotated(manifest, {APPLIED: child_metadata.digest(counted)})


def _is_so(manifest: Json, body: Json | None) -> bool:
    """Whether `body` already agrees with `manifest`, apart from defaults, the fields of other owners, and the way in which
    quantities are written."""
    if body is None or _is_being_deleted(body):
        return False
    return _covers(body, manifest) or _covers(quantity.normalised(body), quantity.normalised(manifest))


def _is_being_deleted(body: Json) -> bool:
    return "deletionTimestamp" in body["metadata"]


def _covers(actual: object, stated: object, field: str = "") -> bool:
    """Whether `actual` has every `stated` value. The API server omits empty values and adds defaults, and others may add
    items to a list whose items have keys. `field` is the name of the values."""
    if isinstance(stated, (str, int)):  # most values; the checks below are slower
        return actual == stated or (stated in ("", 0, False) and actual is None)
    if isinstance(stated, Mapping):
        if not isinstance(actual, Mapping):
            return not stated and actual is None
        return all(_covers(actual.get(key), value, key) for key, value in stated.items())
    if isinstance(stated, Sequence):
        if not isinstance(actual, Sequence):
            return not stated and actual is None
        if len(actual) > len(stated) and (key := MERGE_KEYS.get(field)):
            found = {item[key]: item for item in actual}
            actual = [found.get(item[key]) for item in stated]
        return len(actual) == len(stated) and all(map(_covers, actual, stated))
    return actual == stated or (not stated and actual is None)
