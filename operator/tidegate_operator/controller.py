"""The operator at work: pools that were woken are reconciled, and steered at their own pace, until it is told to
stop.

`handlers` wakes pools when kopf's watches see a change; the resync catches whatever no watch has seen (a child that
someone has deleted, a write that was refused for a while).
"""

import asyncio
import datetime
import logging

from tidegate_operator import cluster, pool_steering, reconcile, workqueue

log = logging.getLogger(__name__)

_AGAIN_S = {reconcile.Result.SETTLED: 60.0, reconcile.Result.REJECTED: 10.0, reconcile.Result.GONE: None}
"""Until a pool is looked at again when nothing wakes it."""


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Controller:
    def __init__(self, api: cluster.Cluster, rules: reconcile.Rules, steering: pool_steering.Steering) -> None:
        self._api = api
        self._rules = rules
        self._steering = steering
        self._to_reconcile: workqueue.Workqueue[pool_steering.Key] = workqueue.Workqueue(expected=cluster.ClusterError)
        self._to_steer: workqueue.Workqueue[pool_steering.Key] = workqueue.Workqueue(expected=cluster.ClusterError)
        self._steered: set[pool_steering.Key] = set()

    def wake(self, namespace: str, name: str) -> None:
        """Something has happened to this pool or to one of its children."""
        key = (namespace, name)
        self._to_reconcile.add(key)
        if key not in self._steered:  # after that it comes back at its own pace
            self._steered.add(key)
            self._to_steer.add(key)

    async def run(self) -> None:
        """Works until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._to_reconcile.run(self._reconcile))
                group.create_task(self._to_steer.run(self._steer))
        finally:
            await self._steering.close()

    async def _reconcile(self, key: pool_steering.Key) -> float | None:
        result = await reconcile.reconcile(self._api, *key, rules=self._rules, now=now())
        return _AGAIN_S[result]

    async def _steer(self, key: pool_steering.Key) -> float | None:
        delay_s = await self._steering.steer(key)
        if delay_s is None:
            self._steered.discard(key)
        return delay_s
