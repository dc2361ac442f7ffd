"""The questions that the engine core asks its driver, each answered only when a decision needs the answer."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from tidegate_policy.model import CallId
from tidegate_policy.policies import QueuedRequest


class EngineProbe(Protocol):
    """A driver's view of its engine at this instant."""

    def kv_tokens(self, call_id: CallId) -> int:
        """Tokens of a running call in the KV cache."""

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        """Tokens of memory that become free when a running call is preempted: no other call and no held context has their
        blocks. The driver may stop counting at `enough` tokens, and it may report fewer tokens than there are."""

    def free_kv_tokens(self) -> int:
        """Tokens that the KV cache can still take; cached tokens that no call uses count as free."""

    def cached_tokens(self, call_id: CallId) -> int:
        """Leading tokens of a waiting call that the prefix cache holds; 0 if unknown."""

    def shared_tokens(self, call_id: CallId) -> int:
        """Of `cached_tokens`, the leading ones whose memory running calls or held contexts keep. The others count as free,
        until the call takes them."""

    def reserved_places(self) -> int:
        """Places in the batch that calls keep which do not run, such as sessions between two inputs."""

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        """Those of the waiting calls that the next step may start together if places and memory suffice, in the same order.
        The others wait for an event, such as the end of the compilation of their grammar. The driver reads `waiting` only
        as far as the caller reads the result."""


class NoProbe:
    """For drivers without these answers, such as tests of queues."""

    def kv_tokens(self, call_id: CallId) -> int:
        return 0

    def own_kv_tokens(self, call_id: CallId, *, enough: int) -> int:
        return 0

    def free_kv_tokens(self) -> int:
        return 0

    def cached_tokens(self, call_id: CallId) -> int:
        return 0

    def shared_tokens(self, call_id: CallId) -> int:
        return 0

    def reserved_places(self) -> int:
        return 0

    def startable(self, waiting: Iterable[QueuedRequest]) -> Iterator[QueuedRequest]:
        return iter(waiting)
