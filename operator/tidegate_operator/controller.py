"""The operator's workqueues, which make pools what their specs say, steer, scale and test them, and the events that fill
them.

Events of kopf's watches go into the watch cache and put their pool into the queues. A reconcile first asks the cache
whether there is something to write. A status is written from the cache. Before an object is written, and while the cache is
unconfirmed, the API server is read. Each pool is checked again after a while without an event, unless its
status changes with events only and the last check found nothing to write. A pool is steered, scaled
and tested once a reconcile has completed what the cache knows of it: to a new process, objects that are not listed yet
would look like deleted ones.
"""

import asyncio
import datetime
import functools
import logging
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tidegate_operator import (
    cluster,
    engine_room,
    operator_metrics,
    pool_canary,
    pool_profiles,
    pool_scaling,
    pool_status,
    pool_steering,
    reconcile,
    weight_status,
    workqueue,
)
from tidegate_operator.cluster import watch_cache
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

RETRY_REJECTED_S = 10.0
"""Time until a write that the API server rejected is tried again."""
TROUBLED_S = 5.0
"""Time until a pool with a pod in trouble, or with a download of weights, is checked again."""
INCOMPLETE_S = 1.0
"""Time until a pool is looked at again whose objects are not all known yet."""
COMPARED_S = 600.0
"""Time between two lists of the pools of a namespace."""
RECONCILED_AT_ONCE = 16
"""Pools that are reconciled at the same time."""
RECONCILED_OF_ONE = 4
"""Those of one namespace among them. The API server takes seconds for each write of a very large pool, and pools of other
namespaces do not wait for that."""
STEERED_AT_ONCE = 128
"""Pools that are steered at the same time."""
SILENT_AT_ONCE = 64
"""Pools that are steered at the same time among those whose parts do not answer in time. Each of them takes seconds, so
they have a queue of their own, in which they delay each other and no pool that answers. The pools of one namespace have
half of these places at most, and half of the `STEERED_AT_ONCE`."""
CHILD_DELAY_S = 0.1
"""Time after an event of a child in which further events of the pool cause no further check."""
POD_DELAY_S = 0.5
"""Time after an event of a pod in which further events of the pool cause no further check."""


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Controller:
    def __init__(
        self,
        api: cluster.Cluster,
        cache: watch_cache.WatchCache,
        rules: reconcile.Rules,
        steering: pool_steering.PoolSteering,
        scaling: pool_scaling.PoolScaling,
        canaries: pool_canary.PoolCanary,
        *,
        resync_s: float,
        metrics: operator_metrics.OperatorMetrics | None = None,
        clock: Callable[[], datetime.datetime] = now,
    ) -> None:
        """`resync_s` is the time after which a pool is checked again without an event."""
        metrics = metrics or operator_metrics.OperatorMetrics()
        self._api = api
        self._cache = cache
        self._rules = rules
        self._steering = steering
        self._canaries = canaries
        self._resync_s = resync_s
        self._clock = clock
        self._to_reconcile = _queue("reconcile", metrics)
        self._to_test = _queue("test", metrics)
        self._paced = (
            _Paced(_queue("steer", metrics), _queue("steer-silent", metrics), steering.steer, steering.is_silent),
            _Paced(_queue("scale", metrics), _queue("scale-silent", metrics), scaling.scale, scaling.is_silent),
        )
        self._left: dict[watch_cache.Key, str | None] = {}
        """The owners of pools that belong to other operators, as far as an event has told of it."""
        self._settled: dict[watch_cache.Key, int] = {}
        """By pool: the number of the state of the cache (`WatchCache.events`) for which a check found nothing to write, and
        nothing that changes with time. While the cache has this state, a further check would find the same."""

    def on_pool(self, event_type: str | None, body: Json) -> None:
        """An event of a ServingPool; `event_type` None is an object of a listing."""
        self._wake(self._cache.on_pool(event_type, body))

    def on_child(self, event_type: str | None, body: Json) -> None:
        """An event of an object that a pool owns."""
        self._wake(self._cache.on_child(event_type, body), CHILD_DELAY_S)

    def on_pod(self, event_type: str | None, body: Json) -> None:
        """An event of a pod. Steering reads pods at its own pace."""
        self._to_reconcile.add(self._cache.on_pod(event_type, body), POD_DELAY_S)

    def forget(self, namespace: str | None) -> None:
        """Leaves the pools of a namespace alone, None for all, because they cannot be listed any more."""
        self._cache.forget(namespace)

    async def find_deleted(self, namespace: str | None) -> None:
        """Compares the cache with a list of the pools, again and again until cancelled: a watch that was down tells
        nothing of a pool that was deleted meanwhile."""
        while True:
            await asyncio.sleep(COMPARED_S)
            try:
                for key in self._cache.keys(namespace) - await self._api.pool_keys(namespace):
                    await self._cache.refresh(key, self._api)
                    self._wake(key)
            except cluster.ClusterError as error:
                log.warning("the list of the pools: %s; next attempt in %.0f s", error, COMPARED_S)
            except Exception:
                log.exception("the list of the pools: a defect; next attempt in %.0f s", COMPARED_S)

    async def run(self) -> None:
        """Works until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                reconciling = self._to_reconcile.run(
                    self._reconcile, at_once=RECONCILED_AT_ONCE, most_of_one=RECONCILED_OF_ONE
                )
                group.create_task(reconciling)
                for paced in self._paced:
                    for queue, at_once in ((paced.queue, STEERED_AT_ONCE), (paced.silent, SILENT_AT_ONCE)):
                        work = functools.partial(self._observe, paced, queue)
                        group.create_task(queue.run(work, at_once=at_once, most_of_one=at_once // 2))
                testing = self._to_test.run(self._test, at_once=STEERED_AT_ONCE, most_of_one=STEERED_AT_ONCE // 2)
                group.create_task(testing)
        finally:
            await self._steering.close()

    def _wake(self, key: watch_cache.Key, delay_s: float = 0.0) -> None:
        self._to_reconcile.add(key, delay_s)
        self._to_test.add(key, CHILD_DELAY_S)
        for paced in self._paced:
            if key not in paced.pools:
                paced.pools.add(key)
                paced.queue.add(key)

    async def _reconcile(self, key: watch_cache.Key) -> float | None:
        if not self._cache.knows(key):
            self._left.pop(key, None)
            self._settled.pop(key, None)
            return None
        body = await self._cache.pool(*key)
        if body is not None and "deletionTimestamp" in body["metadata"]:
            return None  # its parts have its deletion in their owner references
        if body is not None and self._rules.is_foreign(body):
            await self._leave(body)
            return None
        events = self._cache.events(key)
        if self._settled.get(key) == events:
            return self._resync_s
        given = None if body is None else await pool_profiles.read(self._api, body)
        if self._cache.is_confirmed(key):
            events = self._cache.events(key)
            known = await self._cache.pool(*key), await self._cache.children(*key), await self._cache.pods(*key)
            body = known[0]
            report = await reconcile.pending_report(*known, rules=self._rules, now=self._clock(), given=given)
            if report is not None:
                if body is not None and report:
                    self._cache.on_written(await reconcile.write_report(self._api, body, report), since=events)
                elif given is None and not self._is_changing(*known):
                    self._settled[key] = events
                return self._next_check_s(*known)
        found = await self._cache.refresh(key, self._api)
        result = await reconcile.carry_out(self._api, *found, rules=self._rules, now=self._clock())
        if result is reconcile.Result.GONE:
            return None
        if result is reconcile.Result.FOREIGN:
            return RETRY_REJECTED_S  # the event of the other operator's claim may come before
        self._left.pop(key, None)
        if result is reconcile.Result.REJECTED:
            return RETRY_REJECTED_S
        return self._next_check_s(*found)

    async def _leave(self, body: Json) -> None:
        """Tells once that a pool belongs to another operator."""
        key, owner = (body["metadata"]["namespace"], body["metadata"]["name"]), reconcile.owner_of(body)
        if self._left.get(key) != owner:
            self._left[key] = owner
            event = reconcile.of_another_operator(body, self._rules, self._clock())
            log.warning("%s/%s: %s", *key, event.message)
            await self._api.record(event)

    def _is_changing(self, body: Json | None, children: Sequence[Json], pods: Sequence[Json]) -> bool:
        """Whether the status or the rollout of a pool changes with time, without an event. A rollout without room goes on
        when the time of an engine that leaves is over (`engine_room`)."""
        lacks_store_s = None if body is None else pool_status.Needs.of(body).lacks_store_s(self._clock())
        is_new = lacks_store_s is not None and lacks_store_s < pool_status.TROUBLE_S
        parts = pool_status.workloads(children)
        unsettled = [part for part in parts if not part.settled]
        waits = any(part.rejected for part in unsettled) or (bool(unsettled) and engine_room.is_leaving(pods))
        return is_new or waits or bool(pool_status.troubles_of(parts, pods)) or bool(weight_status.downloading(pods))

    def _next_check_s(self, body: Json | None, children: Sequence[Json], pods: Sequence[Json]) -> float:
        return min(self._resync_s, TROUBLED_S) if self._is_changing(body, children, pods) else self._resync_s

    async def _is_incomplete(self, key: watch_cache.Key) -> bool:
        """Whether objects of a pool of this operator may be missing in the cache. A reconcile asks for them."""
        body = await self._cache.pool(*key)
        return body is not None and not self._rules.is_foreign(body) and not self._cache.is_complete(key)

    async def _test(self, key: watch_cache.Key) -> float | None:
        return INCOMPLETE_S if await self._is_incomplete(key) else await self._canaries.test(key)

    async def _observe(
        self, paced: "_Paced", queue: workqueue.Workqueue[watch_cache.Key], key: watch_cache.Key
    ) -> float | None:
        """Works on a pool of `queue`. The pool goes on in the queue for silent pools, or for the others, as it answers."""
        if await self._is_incomplete(key):
            return INCOMPLETE_S
        delay_s = await paced.work(key)
        if delay_s is None:
            paced.pools.discard(key)
            body = await self._cache.pool(*key)
            if body is not None and "deletionTimestamp" not in body["metadata"]:
                self._wake(key)  # a pool of this name appeared meanwhile
            return None
        following = paced.silent if paced.is_silent(key) else paced.queue
        if following is queue:
            return delay_s
        following.add(key, delay_s)
        return None


@dataclass(frozen=True, slots=True)
class _Paced:
    """Work on pools that return to their queue at their own pace."""

    queue: workqueue.Workqueue[watch_cache.Key]
    silent: workqueue.Workqueue[watch_cache.Key]
    """Of the pools whose parts do not answer in time."""
    work: Callable[[watch_cache.Key], Awaitable[float | None]]
    is_silent: Callable[[watch_cache.Key], bool]
    pools: set[watch_cache.Key] = field(default_factory=set)


def _queue(name: str, metrics: operator_metrics.OperatorMetrics) -> workqueue.Workqueue[watch_cache.Key]:
    made: workqueue.Workqueue[watch_cache.Key] = workqueue.Workqueue(
        expected=cluster.ClusterError, group=operator.itemgetter(0)
    )
    made.attempted = metrics.add_queue(name, made.reading)
    return made
