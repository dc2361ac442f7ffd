"""Keeps the watches of each served namespace alive, so that trouble in one namespace stays there.

kopf ends all its watches when one of them is refused: the namespace was deleted, and the operator's rights with it, or the
cluster has no ServingPool resource. So each namespace has kopf's watches of its own, in a thread of its own, because kopf
cancels the other tasks of its event loop when it ends. Watches that ended start again as soon as the API server lists the
namespace's pools. The API server does not always end the watches of a resource that was deleted, so a deleted pool is a
reason to look whether the resource is still there.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import kopf

from tidegate_operator import cluster, handlers
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Time between two checks of a namespace whose pools cannot be listed."""
PAUSE_S = 1.0
"""Time between the end of watches and the next check."""
LONGEST_PAUSE_S = 60.0
"""Most time between two starts of watches that fail at once."""
LASTED_S = 60.0
"""Time after which watches count as having worked."""
DOUBTS_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""After a pool was deleted: times between looks whether the cluster still has the resource."""
STOP_S = 2.0
"""Most time that a shutdown waits for the threads."""


class Events:
    """Takes the events of a kopf thread to the event loop of the operator."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receiver: handlers.Receiver) -> None:
        self._loop = loop
        self._receiver = receiver
        self.deleted = asyncio.Event()
        """A pool was deleted, perhaps with the resource."""

    def on_pool(self, event_type: str | None, body: Json) -> None:
        self._pass(self._receiver.on_pool, event_type, body)
        if event_type == "DELETED":
            self._pass(self.deleted.set)

    def on_child(self, event_type: str | None, body: Json) -> None:
        self._pass(self._receiver.on_child, event_type, body)

    def on_pod(self, event_type: str | None, body: Json) -> None:
        self._pass(self._receiver.on_pod, event_type, body)

    def _pass(self, receive: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the operator ends
            self._loop.call_soon_threadsafe(receive, *arguments)


async def keep(
    namespace: str | None,
    server: cluster.PoolLister,
    receiver: handlers.Receiver,
    *,
    forget: Callable[[str | None], None],
) -> None:
    """Watches one namespace, None for all, until cancelled. `forget` is called when the API server rejects a list of its
    pools."""
    where = f"namespace {namespace}" if namespace else "the cluster"
    failures, reported = 0, ""
    while True:
        try:
            await server.check_pools(namespace)
            if reported:
                log.info("%s is served again", where)
                reported = ""
            began_at_s = asyncio.get_running_loop().time()
            why = await _watch(namespace, server, receiver)
        except cluster.ClusterError as error:
            if isinstance(error, cluster.RejectedError):  # else the API server does not answer, and may still have them
                forget(namespace)
            if str(error) != reported:
                log.warning("%s is not served: %s", where, error)
            reported = str(error)
            await asyncio.sleep(max(RETRY_S, error.retry_after_s))
            continue
        lasted = asyncio.get_running_loop().time() - began_at_s >= LASTED_S
        failures = 1 if lasted else failures + 1
        log.warning("the watches of %s ended and start again: %s", where, why)
        await asyncio.sleep(min(PAUSE_S * 2 ** min(failures - 1, 10), LONGEST_PAUSE_S))


async def _watch(namespace: str | None, server: cluster.PoolLister, receiver: handlers.Receiver) -> str:
    """Runs kopf's watches in a thread until they end; returns the reason. A cancellation stops them. Raises
    `cluster.RejectedError` when the API server rejects a list of the pools."""
    loop = asyncio.get_running_loop()
    events = Events(loop, receiver)
    stop = threading.Event()
    ended: asyncio.Future[str] = loop.create_future()

    def tell(why: str) -> None:
        if not ended.done():
            ended.set_result(why)

    def run() -> None:
        try:
            asyncio.run(_kopf(namespace, events, stop))
            why = "kopf ended"
        except Exception as error:  # noqa: BLE001  # reported in one line by `keep`
            why = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, why)

    thread = threading.Thread(target=run, name=f"watches of {namespace or 'all namespaces'}", daemon=True)
    thread.start()
    rejected = asyncio.create_task(_rejected(namespace, server, events.deleted))
    try:
        either: set[asyncio.Future[Any]] = {ended, rejected}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise rejected.result()
        return ended.result()
    finally:
        rejected.cancel()
        if not ended.done():
            stop.set()
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(contextlib.suppress(TimeoutError))
                await stack.enter_async_context(asyncio.timeout(STOP_S))
                await asyncio.shield(ended)


async def _rejected(namespace: str | None, server: cluster.PoolLister, deleted: asyncio.Event) -> cluster.RejectedError:
    """Waits until pools were deleted and the API server rejects a list of them; returns the rejection."""
    while True:
        await deleted.wait()
        deleted.clear()
        for wait_s in DOUBTS_S:
            await asyncio.sleep(wait_s)
            try:
                await server.check_pools(namespace)
            except cluster.RejectedError as error:
                return error
            except cluster.ClusterError:
                continue  # the API server does not answer, which says nothing


async def _kopf(namespace: str | None, events: Events, stop: threading.Event) -> None:
    try:
        await kopf.operator(
            registry=handlers.registry,
            memo=events,
            standalone=True,
            clusterwide=namespace is None,
            namespaces=() if namespace is None else [namespace],
            stop_flag=stop,
        )
    finally:
        stop.set()  # kopf waits for it in a thread of this event loop
