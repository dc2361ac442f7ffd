"""What the drivers of pools share: what they know of each pool, where they read and write, and with which token they call
a pool's gateways."""

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tidegate_operator import cluster, own_profile, pool_profiles, pool_secret, reconcile, spec
from tidegate_operator.spec import Json

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    """The last spec of a pool, and what it was made of."""

    body: Json
    profiles: own_profile.OwnProfiles
    pool: spec.Pool


class PoolDriver(Generic[A, K]):
    """The base class of what drives all pools of this operator."""

    def __init__(
        self,
        api: cluster.Cluster,
        rules: reconcile.Rules,
        *,
        reads: cluster.Reader,
        admin_of: Callable[[str, str | None], A],
        clock: Callable[[], datetime.datetime],
        monotonic: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`admin_of` gives access to the gateways of a pool by its namespace and token. `monotonic` is a clock that is
        never set, in seconds; without it `clock` must not be set either."""
        self._api = api
        self._rules = rules
        self._reads = reads
        self._admin_of = admin_of
        self._clock = clock
        self._monotonic = monotonic
        self._known: dict[watch_cache.Key, K] = {}
        """By pool: what the driver knows of it from one observation to the next."""
        self._unanswered: dict[watch_cache.Key, int] = {}
        """By pool: the last observations in a row in which a part did not answer in time."""
        self._parsed: dict[watch_cache.Key, _Parsed] = {}

    def is_silent(self, key: "watch_cache.Key") -> bool:
        """Whether each of the last observations of a pool waited for a part that did not answer in time."""
        return self._unanswered.get(key, 0) >= SILENT_AFTER

    def _observed(self, key: "watch_cache.Key", *, answered: bool = True) -> None:
        """An observation has ended, or the pool is gone."""
        if answered:
            self._unanswered.pop(key, None)
        else:
            self._unanswered[key] = self._unanswered.get(key, 0) + 1

    def _gone(self, key: "watch_cache.Key") -> None:
        """The pool is gone, or is left alone."""
        self._observed(key)
        self._parsed.pop(key, None)

    def _parse(self, body: Json, children: Iterable[Json]) -> spec.Pool:
        """The spec of a pool with the profiles in force. Raises InvalidSpecError.

        Most observations find the very body of the one before, because a watch cache replaces the body of a pool that has
        changed. Such a body is not parsed again."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        profiles = pool_profiles.in_force(body, children)
        last = self._parsed.get(key)
        if last is None or last.body is not body or last.profiles != profiles:
            pool = spec.parse(body, self._rules.known, profiles)
            last = self._parsed[key] = _Parsed(body=body, profiles=profiles, pool=pool)
        return last.pool

    async def _access(self, pool: spec.Pool, now: float, known: Access[A] | None = None) -> Access[A]:
        """`known`, or a new access if there is none yet, or if a gateway rejects its token."""
        if known is not None and not (known.admin.rejects_token and may_read_again(known.read_at_s, now)):
            return known
        token = await pool_secret.token(self._api, pool)
        return Access(admin=self._admin_of(pool.namespace, token), read_at_s=now)
