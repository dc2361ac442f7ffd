"""The questions that the engine core asks its driver, each answered only when a decision needs the answer."""

from typing import Protocol

from tidegate_policy.model import CallId


class EngineProbe(Protocol):
    """A driver's view of its engine at this instant."""

    def kv_tokens(self, call_id: CallId) -> int:
        """Tokens of a running call in the KV cache."""

    def free_kv_tokens(self) -> int:
        """Tokens that the KV cache can still take; cached tokens that no call uses count as free."""

    def cached_tokens(self, call_id: CallId) -> int:
        """Leading tokens of a waiting call that the prefix cache holds; 0 if unknown."""


class NoProbe:
    """For drivers without these answers, such as tests of queues."""

    def kv_tokens(self, call_id: CallId) -> int:
        return 0

    def free_kv_tokens(self) -> int:
        return 0

    def cached_tokens(self, call_id: CallId) -> int:
        return 0
