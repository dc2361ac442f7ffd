"""What the operator needs of a cluster: a port, and the errors that come through it.

`api_server` is the one implementation, over HTTP; tests wrap it to make it fail. `lease` says whether this process
may act at all. Nothing outside this package talks to the API server, kopf's watches aside.

    ClusterError            the API server said no, or could not be asked: trying again may help
        RejectedError        it will say no again until something else changes: a quota, an admission rule, a missing right
"""

from collections.abc import Sequence
from typing import Protocol

from tidegate_operator import objects, pool_status
from tidegate_operator.spec import Json


class ClusterError(Exception):
    """The API server said no, or could not be asked. Trying again may help."""


class RejectedError(ClusterError):
    """The API server understood and refused; the message is its own."""


class Cluster(Protocol):
    """What the operator needs of a cluster. `ApiServer` is the one implementation; tests wrap it to make it fail."""

    async def pool(self, namespace: str, name: str) -> Json | None: ...

    async def children(self, namespace: str, pool: str) -> Sequence[Json]:
        """Every object that carries the pool's label, of the kinds that a pool owns."""

    async def get(self, reference: objects.Reference) -> Json | None: ...

    async def engine_pods(self, namespace: str, pool: str) -> Sequence[Json]: ...

    async def apply(self, manifest: Json) -> Json:
        """Makes the object so; returns it as it is now."""

    async def delete(self, reference: objects.Reference, uid: str) -> None:
        """Deletes that very object, and what it owns after it; no error when it is gone."""

    async def apply_status(self, namespace: str, name: str, body: Json, *, writer: str) -> None:
        """States everything that `writer` has to say in the pool's status; what other writers say stays."""

    async def record(self, event: pool_status.Event) -> None:
        """Posts an event; the same event twice is posted once."""
