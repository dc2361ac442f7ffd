"""How much is read and kept of the objects with a pool's label: what the operator needs, within bounds.

Whoever may write in a namespace can put the label on objects of a megabyte each, and on objects of a million parts, which
take twenty times their bytes as Python objects. An operator that read and kept them whole was killed at each start
(decision 63). So an object with more parts than any of a pool has is known by its name only, before it is parsed. So is
one that nests deeper than `MOST_LEVELS`: the API server takes 10,000 levels, no parser of JSON here takes more than 1,024,
and an object that cannot be parsed would end the watch of all namespaces.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import orjson

from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json

PAGE = 4
"""Objects of one answer of the API server, of which each may have 1.5 MiB."""
MOST_PARTS, MOST_POOL_PARTS = 32 * 1024, 256 * 1024
"""Objects, lists and commas in the JSON of an object, and in that of a ServingPool."""
MOST_LEVELS = 100
"""How deep the objects and lists in the JSON of an object are nested. Those of a pool have about 20 levels."""
MOST_BYTES = 64 * 1024 * 1024
"""Of the objects of the pools of a namespace that are kept, as `bytes_of` counts them."""
MOST_LISTED_BYTES = 16 * 1024 * 1024
"""Of the objects of one kind of a pool, as they are listed."""
_FIELD_BYTES = 100
"""Memory of a field, beside its text."""
_ORJSON_LEVELS = 1024
"""The levels that `orjson.loads` takes."""
_API_SERVER_LEVELS = 10_000
"""The levels that the API server takes, of an object and of its part of a list."""
_IDENTITY = ("name", "namespace", "uid", "deletionTimestamp")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_UNREAD = frozenset({"env", "envFrom", "command", "args", "volumeMounts", *_PROBES})
"""Fields of the containers of a pod that nothing reads."""


class Labels(msgspec.Struct, omit_defaults=True):
    pool: str | None = msgspec.field(default=None, name=child_metadata.POOL)


class Metadata(msgspec.Struct, omit_defaults=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    deletionTimestamp: str | None = None
    labels: Labels = msgspec.field(default_factory=Labels)


class Identity(msgspec.Struct, omit_defaults=True):
    """Which object it is. msgspec makes no Python object of the other fields."""

    apiVersion: str = ""
    kind: str = ""
    metadata: Metadata = msgspec.field(default_factory=Metadata)


class Listed(msgspec.Struct):
    """A list, or a page of one."""

    items: list[msgspec.Raw]
    apiVersion: str = ""
    kind: str = ""
    metadata: dict[str, Any] | None = None


class Event(msgspec.Struct):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


_identity = msgspec.json.Decoder(Identity)
_listed = msgspec.json.Decoder(Listed)
_event = msgspec.json.Decoder(Event)

T = TypeVar("T")


def _skimmed(decoder: "msgspec.json.Decoder[T]", text: bytes) -> T:
    """What the fields of the decoder's type say. msgspec skips other fields level by level within the recursion limit of
    Python, and a level takes little of the C stack. Raises ValueError."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_API_SERVER_LEVELS + 2 * limit)
    try:
        return decoder.decode(text)
    except RecursionError as error:
        raise ValueError("the JSON nests too deeply") from error
    finally:
        sys.setrecursionlimit(limit)


def _opened(text: bytes) -> int:
    """Objects and lists in a text, and so at least its levels."""
    return text.count(b"{") + text.count(b"[")


def parsed(text: bytes) -> Any:
    """What a text of JSON says; the identity of an object that has too many parts or levels. Raises ValueError."""
    opened = _opened(text)
    parts = opened + text.count(b",")
    if parts > MOST_PARTS:
        found = _skimmed(_identity, text)
        if parts > (MOST_POOL_PARTS if found.kind == child_metadata.KIND else MOST_PARTS):
            return msgspec.to_builtins(found)
    if opened <= MOST_LEVELS:
        return orjson.loads(text)
    spare = _ORJSON_LEVELS - MOST_LEVELS
    try:  # orjson refuses what has more than `MOST_LEVELS`, inside so many lists
        whole = orjson.loads(b"[" * spare + text + b"]" * spare)
        for _ in range(spare):
            (whole,) = whole
    except ValueError:
        return msgspec.to_builtins(_skimmed(_identity, text))
    return whole


def is_whole(body: Json) -> bool:
    """Whether `parsed` has kept more of an object of the API server than its identity."""
    return "creationTimestamp" in body["metadata"]


def page(text: bytes) -> tuple[list[Any], Listed]:
    """The objects of a list, each as `parsed`, and the list. Raises ValueError, and `msgspec.ValidationError` for JSON that
    is no list."""
    listed = _skimmed(_listed, text)
    return [parsed(bytes(item)) for item in listed.items], listed


def event(line: bytes) -> bytes:
    """A line of a watch, with the identity of an object that has too many parts or levels. Raises ValueError."""
    opened = _opened(line)
    if opened <= MOST_LEVELS and opened + line.count(b",") <= MOST_PARTS:
        return line
    found = _skimmed(_event, line)
    return orjson.dumps({"type": found.type, "object": parsed(bytes(found.object))})


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

    def children(self, listed: Iterable[Json]) -> Iterator[Json]:
        """Objects that the pool owns as they are, and the names of others."""
        for body in listed:
            kept = body if claims(body, self._pool) else name_of(body)
            if self._fits(kept):
                yield kept

    def pods(self, listed: Iterable[Json]) -> Iterator[Json]:
        return filter(self._fits, map(of_pod, listed))

    def _fits(self, body: Json) -> bool:
        size = bytes_of(body)
        if size > self._room:
            return False
        self._room -= size
        return True
