"""What the drivers of pools share: what they know of each pool, where they read and write, and with which token they call
a pool's gateways."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tidegate_operator import cluster, pool_secret, reconcile, spec

if TYPE_CHECKING:
    from tidegate_operator.cluster import watch_cache

TOKEN_S = 30.0
"""Least time between two readings of a pool's Secret."""
SILENT_AFTER = 2
"""Observations in a row, without an answer, after which a pool is silent."""


def may_read_again(read_at_s: float, now: float) -> bool:
    """Whether a Secret that was read at `read_at_s` may be read again. The clock may have stepped."""
    return abs(now - read_at_s) >= TOKEN_S


class Admin(Protocol):
    """A pool's gateways; `gateway_admin.GatewayAdmin` calls them over HTTP."""

    @property
    def rejects_token(self) -> bool: ...


A = TypeVar("A", bound=Admin)
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access(Generic[A]):
    """A pool's gateways, with the token of its Secret."""

    admin: A
    read_at_s: float
    """When the Secret was read."""


class PoolDriver(Generic[A, K]):
    """The base class of what drives all pools of this operator."""

    def __init__(
        self,
        api: cluster.Cluster,
        rules: reconcile.Rules,
        *,
        reads: cluster.Reader,
        admin_of: Callable[[spec.Pool, str | None], A],
        clock: Callable[[], datetime.datetime],
    ) -> None:
        self._api = api
        self._rules = rules
        self._reads = reads
        self._admin_of = admin_of
        self._clock = clock
        self._known: dict[watch_cache.Key, K] = {}
        """By pool: what the driver knows of it from one observation to the next."""
        self._unanswered: dict[watch_cache.Key, int] = {}
        """By pool: the last observations in a row in which a part did not answer in time."""

    def is_silent(self, key: "watch_cache.Key") -> bool:
        """Whether each of the last observations of a pool waited for a part that did not answer in time."""
        return self._unanswered.get(key, 0) >= SILENT_AFTER

    def _observed(self, key: "watch_cache.Key", *, answered: bool = True) -> None:
        """An observation has ended, or the pool is gone."""
        if answered:
            self._unanswered.pop(key, None)
        else:
            self._unanswered[key] = self._unanswered.get(key, 0) + 1

    async def _access(self, pool: spec.Pool, now: float, known: Access[A] | None = None) -> Access[A]:
        """`known`, or a new access if there is none yet, or if a gateway rejects its token."""
        if known is not None and not (known.admin.rejects_token and may_read_again(known.read_at_s, now)):
            return known
        return Access(admin=self._admin_of(pool, await pool_secret.token(self._api, pool)), read_at_s=now)
