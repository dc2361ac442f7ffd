"""May this process act? Only while it holds the Lease; so two operators never act at the same time.

The Lease is held for DURATION_S and renewed every RETRY_S; a holder that could not renew for RENEW_S stops acting, well
before another may start. Judged by each process's own clock from the moment at which it saw the Lease change, so clocks
that differ do no harm. A holder that ends politely gives the Lease back, and the next takes over at once.
"""

import asyncio
import datetime
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client import exceptions
from kubernetes.aio.leaderelection import electionconfig, leaderelection
from kubernetes.aio.leaderelection.resourcelock import leaselock

log = logging.getLogger(__name__)

DURATION_S = 15.0
RENEW_S = 10.0
RETRY_S = 2.0
CALL_S = 4.0
"""One request to the API server; hanging requests must not make a holder overlook that its time is over."""


class LostError(Exception):
    """The Lease could not be renewed: this process must not act any more."""


class _Lock(leaselock.LeaseLock):  # type: ignore[misc]
    """kubernetes.aio's lock, for which an API server that cannot be reached, or hangs, is one failed try, not the end."""

    async def get(self, name: str, namespace: str) -> Any:
        failed = (False, exceptions.ApiException(status=0, reason="the API server does not answer"))
        return await _tried(super().get(name, namespace), failed)

    async def create(self, name: str, namespace: str, election_record: Any) -> Any:
        return await _tried(super().create(name, namespace, election_record), False)

    async def update(self, name: str, namespace: str, updated_record: Any) -> Any:
        return await _tried(super().update(name, namespace, updated_record), False)


async def _tried(call: Awaitable[Any], failed: Any) -> Any:
    try:
        async with asyncio.timeout(CALL_S):
            return await call
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.warning("the Lease: %r", error)
        return failed


async def hold(
    api: client.ApiClient, namespace: str, name: str, *, identity: str, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Waits for the Lease, runs `work` while it is held, gives it back when `work` ends.

    Raises LostError, with `work` cancelled, when the Lease is lost meanwhile; and whatever `work` raises.
    """
    held = asyncio.Event()

    async def started() -> None:
        held.set()

    async def stopped() -> None:
        raise LostError(f"the Lease {namespace}/{name} could not be renewed for {RENEW_S:.0f} s")

    lock = _Lock(name, namespace, identity, api)
    election = leaderelection.LeaderElection(
        electionconfig.Config(lock, DURATION_S, RENEW_S, RETRY_S, onstarted_leading=started, onstopped_leading=stopped)
    )
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(election.run())
            await held.wait()
            log.info("%s holds the Lease %s/%s", identity, namespace, name)
            working = group.create_task(work())
            working.add_done_callback(lambda _: renewing.cancel())
    except* Exception as errors:
        raise errors.exceptions[0] from errors
    await _give_back(api, namespace, name, identity)


async def _give_back(api: client.ApiClient, namespace: str, name: str, identity: str) -> None:
    """Lets the next holder in at once. Best effort: without it the Lease runs out by itself."""
    leases = client.CoordinationV1Api(api)
    try:
        async with asyncio.timeout(CALL_S):
            lease = await leases.read_namespaced_lease(name, namespace)
            if lease.spec.holder_identity == identity:
                lease.spec.holder_identity = None
                lease.spec.renew_time = datetime.datetime.now(datetime.UTC)
                await leases.replace_namespaced_lease(name, namespace, lease)
    except (exceptions.ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
        log.warning("the Lease was not given back and runs out by itself: %s", error)
