"""What does the operator need of a cluster? Reads and writes as protocols, and the errors that they raise.

`api_server` implements both over HTTP; tests wrap it to make it fail. `watch_cache` implements the reads without a request.
`lease` decides whether this process may act at all. Apart from kopf's watches, only this package talks to the API server.

    ClusterError            the API server answered with an error or could not be asked: trying again may help
        RejectedError       it rejects the request until something else changes: a quota, an admission rule, a missing right
"""

from collections.abc import Sequence
from typing import Protocol

from tidegate_operator import objects, pool_status
from tidegate_operator.spec import Json


class ClusterError(Exception):
    """The API server answered with an error or could not be asked. Trying again may help."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Time for which the API server asks not to try again."""
        self.status = status
        """The HTTP status of the answer; None if there was no answer, or none of an API server."""


class RejectedError(ClusterError):
    """The API server understood the request and rejected it; the message is the API server's own."""


class UnknownKindError(RejectedError):
    """The cluster does not have the resource."""


class Reader(Protocol):
    """The objects of a pool, as far as the implementation knows them."""

    async def pool(self, namespace: str, name: str) -> Json | None: ...

    async def children(self, namespace: str, pool: str) -> Sequence[Json]:
        """The objects of a pool, of the kinds that a pool owns. The API server also lists those of other owners that carry
        the pool's label."""

    async def pods(self, namespace: str, pool: str) -> Sequence[Json]:
        """The pods of all components of the pool."""


class PoolLister(Protocol):
    """Tells whether the pools of a namespace can be listed."""

    async def check_pools(self, namespace: str | None) -> None:
        """Raises ClusterError if the pools of the namespace, None for all, cannot be listed."""

    async def pool_keys(self, namespace: str | None) -> set[tuple[str, str]]:
        """Namespace and name of each pool of the namespace, None for all."""


class Cluster(Reader, PoolLister, Protocol):
    """Reads and writes of a cluster. `ApiServer` is the one implementation; tests wrap it to make it fail."""

    async def get(self, reference: objects.Reference) -> Json | None: ...

    async def last_line(self, namespace: str, pod: str, container: str) -> str | None:
        """The last line of a container's log; None if there is none, or if it cannot be read."""

    async def autoscalers(self, namespace: str) -> Sequence[Json]:
        """The HorizontalPodAutoscalers of the namespace, those of KEDA included; none if they may not be listed."""

    async def secret(self, namespace: str, name: str) -> Json | None: ...

    async def create_secret(self, manifest: Json) -> None:
        """Creates a Secret; one that exists already stays as it is."""

    async def apply(self, manifest: Json) -> Json:
        """Creates or changes the object to what the manifest states; returns the resulting object."""

    async def claim(self, namespace: str, name: str, owner: str) -> bool:
        """Marks a pool without an owner as owned by the operator `owner`; false if another operator was faster."""

    async def state_replicas(self, namespace: str, name: str, total: int) -> None:
        """Writes `spec.replicas` of a pool, and the annotation that tells who did."""

    async def delete(self, reference: objects.Reference, uid: str) -> None:
        """Deletes the object with this uid, and in the background what it owns; no error when it does not exist."""

    async def apply_status(self, namespace: str, name: str, body: Json, *, writer: str) -> Json:
        """States everything that `writer` reports in the pool's status; the fields of other writers stay. Returns the
        pool as it is then."""

    async def record(self, event: pool_status.Event) -> None:
        """Posts an event. Posting the same event twice has the effect of posting it once."""
