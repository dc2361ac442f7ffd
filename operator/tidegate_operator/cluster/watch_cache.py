"""The pools, their children and their pods, as kopf's watches last reported them.

The cache answers the reads that repeat while nothing changes, so an idle pool causes no request to the API server. It is
not an authority for writes of objects: a reconcile that has some to write reads the API server first (`refresh`).

A watch that starts again lists its objects and reports no object that was deleted in the meantime. So every listing
event makes the pool's entry unconfirmed, and `refresh` replaces an unconfirmed entry by what the API server answers. An
event that arrives during a `refresh` is newer than its answer; then the entry stays unconfirmed. After a start the kinds of
objects are listed one by one, so an entry that was never refreshed may lack anything.

Of objects that the pool does not own only the names are kept. What the pools of one namespace have is bounded
(`object_parts.MOST_BYTES`): objects beyond are absent, and their entry is neither confirmed nor complete.
"""

import collections
import contextlib
import itertools
import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tidegate_operator import cluster, objects
from tidegate_operator.cluster import object_parts
from tidegate_operator.render import child_metadata
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a pool."""
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """What the watches reported of one pool."""

    pool: Json | None = None
    children: dict[tuple[str, str], Json] = field(default_factory=dict)
    """By kind and name."""
    pods: dict[str, Json] = field(default_factory=dict)
    """By name."""
    bytes: dict[Hashable, int] = field(default_factory=dict)
    """Of each of its children and pods, by the same keys."""
    left_out: set[Hashable] = field(default_factory=set)
    """The keys of children and pods for which the namespace had no room."""
    is_confirmed: bool = False
    """Whether the entry holds no object that a watch has missed the deletion of."""
    is_complete: bool = False
    """Whether the entry was confirmed once, so that it has what the watches had not listed yet."""
    events: int = 0
    """The number of the last change of the entry. No other change of any entry has it."""


class WatchCache:
    """A `cluster.Reader` that makes no request."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._numbers = itertools.count(1)
        self._bytes: collections.Counter[str] = collections.Counter()
        """Of the children and pods of each namespace."""

    async def pool(self, namespace: str, name: str) -> Json | None:
        return self._entry((namespace, name)).pool

    async def children(self, namespace: str, pool: str) -> Sequence[Json]:
        entry = self._entry((namespace, pool))
        return objects.owned(entry.pool, entry.children.values())

    async def pods(self, namespace: str, pool: str) -> Sequence[Json]:
        return [*self._entry((namespace, pool)).pods.values()]

    def pools(self) -> Iterator[Json]:
        """The ServingPools of all namespaces."""
        return (entry.pool for entry in self._entries.values() if entry.pool is not None)

    def is_confirmed(self, key: Key) -> bool:
        """Whether a decision that nothing must be written may rest on the cache."""
        entry = self._entry(key)
        return entry.is_confirmed and not entry.left_out

    def is_complete(self, key: Key) -> bool:
        """Whether the cache lacks no object of the pool, so that the absence of one means something. While the cache is not
        confirmed, it may hold deleted ones too."""
        entry = self._entry(key)
        return entry.is_complete and not entry.left_out

    def knows(self, key: Key) -> bool:
        """Whether a watch has reported the pool or an object of it."""
        return key in self._entries

    def keys(self, namespace: str | None) -> set[Key]:
        """The pools of a namespace, None for all, of which the watches reported anything."""
        return {key for key in self._entries if namespace in (None, key[0])}

    def bytes_in(self, namespace: str) -> int:
        """About the memory of the children and pods that are kept for a namespace."""
        return self._bytes[namespace]

    def forget(self, namespace: str | None) -> None:
        """Drops what the watches of a namespace reported, None for all namespaces."""
        for key in [key for key in self._entries if namespace in (None, key[0])]:
            self._remove(key)

    async def refresh(self, key: Key, api: cluster.Reader) -> tuple[Json | None, Sequence[Json], Sequence[Json]]:
        """The pool, its children and its pods from the API server. The cache keeps them unless an event came meanwhile.
        It keeps objects of other owners with the pool's label too, because the pool may be created again."""
        before = self._entry(key).events
        pool, labelled, pods = await api.pool(*key), await api.children(*key), await api.pods(*key)
        children = objects.owned(pool, labelled)
        if self._entry(key).events != before:
            return pool, children, pods
        self._remove(key)
        if pool is not None or labelled:
            entry = self._entries[key] = _Entry(
                pool=pool, is_confirmed=True, is_complete=True, events=next(self._numbers)
            )
            for body in labelled:
                self._keep_child(entry, "MODIFIED", body)
            for body in pods:
                self._keep_pod(entry, "MODIFIED", body)
        return pool, children, pods

    def on_pool(self, event_type: str | None, body: Json) -> Key:
        """Takes in an event of a ServingPool; `event_type` None is an object of a listing. Returns the pool's key."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        with self._changing(key, event_type) as entry:
            if event_type != "DELETED":
                if entry.pool is None or entry.pool["metadata"]["uid"] != body["metadata"]["uid"]:
                    entry.is_confirmed = entry.is_complete = False  # of its objects only the names were kept
                entry.pool = body
            elif entry.pool is not None and entry.pool["metadata"]["uid"] == body["metadata"]["uid"]:
                entry.pool = None
        return key

    def events(self, key: Key) -> int:
        """A number that is another one after each change of what the cache knows of the pool."""
        return self._entry(key).events

    def on_written(self, body: Json, *, since: int) -> None:
        """Takes in a ServingPool as a write has left it, before its event comes, if no event has come since number
        `since`: such an event may be newer."""
        entry = self._entries.get((body["metadata"]["namespace"], body["metadata"]["name"]))
        if entry is not None and entry.events == since:
            entry.pool = body
            entry.events = next(self._numbers)

    def on_child(self, event_type: str | None, body: Json) -> Key:
        """Takes in an event of a labelled object of a kind that pools own. Returns the key of the pool in its label."""
        key = _labelled(body)
        with self._changing(key, event_type) as entry:
            self._keep_child(entry, event_type, body)
        return key

    def on_pod(self, event_type: str | None, body: Json) -> Key:
        """Takes in an event of a pod. Returns the key of the pool in its label."""
        key = _labelled(body)
        with self._changing(key, event_type) as entry:
            self._keep_pod(entry, event_type, body)
        return key

    def _keep_child(self, entry: _Entry, event_type: str | None, body: Json) -> None:
        owner = objects.controller_uid(body)
        is_its = entry.pool is not None and owner == entry.pool["metadata"]["uid"]
        kept = body if is_its else object_parts.name_of(body, owner=owner)
        self._take_in(entry, entry.children, (body["kind"], body["metadata"]["name"]), event_type, kept)

    def _keep_pod(self, entry: _Entry, event_type: str | None, body: Json) -> None:
        kept = object_parts.name_of(body) if entry.pool is None else object_parts.of_pod(body)
        self._take_in(entry, entry.pods, body["metadata"]["name"], event_type, kept)

    def _take_in(self, entry: _Entry, bodies: dict[K, Json], key: K, event_type: str | None, body: Json) -> None:
        """The deletion of an object may be reported after the creation of its namesake, hence the uid decides."""
        namespace = body["metadata"]["namespace"]
        is_earlier = key in bodies and bodies[key]["metadata"]["uid"] != body["metadata"]["uid"]
        if event_type == "DELETED" and is_earlier:
            return
        bodies.pop(key, None)
        entry.left_out.discard(key)
        self._bytes[namespace] -= entry.bytes.pop(key, 0)
        if event_type == "DELETED":
            return
        size = object_parts.bytes_of(body)
        if self._bytes[namespace] + size > object_parts.MOST_BYTES:
            if not entry.left_out:
                pool = body["metadata"]["labels"][child_metadata.POOL]
                log.warning("pool %s/%s is not steered: its namespace has too many objects of pools", namespace, pool)
            entry.left_out.add(key)
        else:
            bodies[key], entry.bytes[key] = body, size
            self._bytes[namespace] += size

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes[key[0]] -= sum(entry.bytes.values())

    def _entry(self, key: Key) -> _Entry:
        return self._entries.get(key) or _Entry()

    @contextlib.contextmanager
    def _changing(self, key: Key, event_type: str | None) -> Iterator[_Entry]:
        entry = self._entries.setdefault(key, _Entry())
        entry.events = next(self._numbers)
        if event_type is None:
            entry.is_confirmed = False
        yield entry
        if entry.pool is None and not entry.children and not entry.pods:
            self._remove(key)


def _labelled(body: Json) -> Key:
    return (body["metadata"]["namespace"], body["metadata"]["labels"][child_metadata.POOL])
