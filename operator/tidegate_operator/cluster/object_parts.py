"""How much is kept of the objects with a pool's label: what the operator reads, and no more than a namespace may have.

Whoever may write in a namespace can put the label on objects of a megabyte each. An operator that kept them whole needed
258 MiB more for 300 ConfigMaps, and was killed at each start (decision 63).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json

PAGE = 4
"""Objects of one answer of the API server, of which each may have 1.5 MiB."""
MOST_BYTES = 64 * 1024 * 1024
"""Of the objects of the pools of a namespace that are kept, as `bytes_of` counts them."""
MOST_LISTED_BYTES = 16 * 1024 * 1024
"""Of the objects of one kind of a pool, as they are listed."""
_FIELD_BYTES = 100
"""Memory of a field, beside its text."""
_IDENTITY = ("name", "namespace", "uid", "deletionTimestamp")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_UNREAD = frozenset({"env", "envFrom", "command", "args", "volumeMounts", *_PROBES})
"""Fields of the containers of a pod that nothing reads."""


def bytes_of(body: Json) -> int:
    """About the memory that an object takes."""
    text = orjson.dumps(body)
    return len(text) + _FIELD_BYTES * text.count(b'":')


def claims(body: Json, pool: str) -> bool:
    """Whether an object says that the ServingPool of this name owns it."""
    owners: list[Any] = body["metadata"].get("ownerReferences", [])
    return any(
        owner.get("controller") and (owner.get("kind"), owner.get("name")) == (child_metadata.KIND, pool)
        for owner in owners
    )


def name_of(body: Json, *, owner: str | None = None) -> Json:
    """Which object it is, and which uid owns it, for an object of another owner."""
    metadata = body["metadata"]
    kept = {key: metadata[key] for key in _IDENTITY if key in metadata}
    kept["labels"] = {child_metadata.POOL: metadata["labels"][child_metadata.POOL]}
    if owner is not None:
        kept["ownerReferences"] = [{"uid": owner, "controller": True}]
    return {**{key: body[key] for key in ("apiVersion", "kind") if key in body}, "metadata": kept}


def of_pod(body: Json) -> Json:
    """A pod without what nothing reads: what its containers run with, and the notes of others."""
    metadata, spec = dict(body["metadata"]), dict(body.get("spec", {}))
    if "annotations" in metadata:
        notes: Mapping[str, str] = metadata["annotations"]
        metadata["annotations"] = {key: notes[key] for key in notes if key.startswith(f"{child_metadata.GROUP}/")}
    for field in {"containers", "initContainers"} & spec.keys():
        spec[field] = [{key: item[key] for key in item.keys() - _UNREAD} for item in spec[field]]
    return {**body, "metadata": metadata, **({"spec": spec} if spec else {})}


class Listing:
    """What is kept of the objects of one kind with the label of a pool, page by page. Objects that do not fit are absent;
    `reconcile` asks for what it misses by its name."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._room = MOST_LISTED_BYTES

    def children(self, page: Iterable[Json]) -> Iterator[Json]:
        """Objects that the pool owns as they are, and the names of others."""
        for body in page:
            kept = body if claims(body, self._pool) else name_of(body)
            if self._fits(kept):
                yield kept

    def pods(self, page: Iterable[Json]) -> Iterator[Json]:
        return filter(self._fits, map(of_pod, page))

    def _fits(self, body: Json) -> bool:
        size = bytes_of(body)
        if size > self._room:
            return False
        self._room -= size
        return True
