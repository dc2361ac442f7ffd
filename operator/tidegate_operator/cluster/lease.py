"""May this process act? Only while it holds the Lease; so two operators never act at the same time.

The holder renews the Lease every RETRY_S. One that could not for RENEW_S stops acting, well before DURATION_S has
passed and another may start. Each process judges by its own monotonic clock, from the moment at which it saw the
Lease change, so clocks that differ do no harm; two that try at the same time are told apart by the Lease's
resourceVersion. A holder that ends politely gives the Lease back, and the next takes over at once.
"""

import asyncio
import datetime
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tidegate_operator.cluster import ClusterError
from tidegate_operator.spec import Json

log = logging.getLogger(__name__)

DURATION_S = 15
RENEW_S = 10
RETRY_S = 2
CALL_S = 4
"""One request to the API server; one that hangs must not make a holder overlook that its time is over."""


class LostError(Exception):
    """The Lease could not be renewed: this process must not act any more."""


class Leases(Protocol):
    """One Lease, as the API server keeps it. Both raise ClusterError."""

    async def read(self) -> Json | None: ...

    async def write(self, body: Json) -> Json | None:
        """Creates or replaces it; None when someone else was faster (its resourceVersion is not the body's)."""


async def hold(leases: Leases, *, identity: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Waits for the Lease, runs `work` while it is held, gives it back when `work` ends.

    Raises LostError, with `work` cancelled, when the Lease is lost meanwhile; and whatever `work` raises.
    """
    candidate = _Candidate(leases, identity)
    while not await candidate.tries():
        await asyncio.sleep(RETRY_S)
    log.info("%s holds the Lease", identity)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(_renew(candidate))
            working = group.create_task(work())
            working.add_done_callback(lambda _: renewing.cancel())
    except* Exception as errors:
        raise errors.exceptions[0] from errors
    finally:
        await candidate.gives_back()


async def _renew(candidate: "_Candidate") -> None:
    """Renews until it cannot; whatever hangs, it ends RENEW_S after the last renewal."""
    while True:
        try:
            async with asyncio.timeout_at(candidate.renewed_s + RENEW_S):
                await _renew_once(candidate)
        except TimeoutError:
            raise LostError(f"the Lease could not be renewed for {RENEW_S} s") from None


async def _renew_once(candidate: "_Candidate") -> None:
    while True:
        await asyncio.sleep(RETRY_S)
        if await candidate.tries():
            return
        if candidate.holder != candidate.identity:
            raise LostError(f"{candidate.holder or 'nobody'} has the Lease now")


class _Candidate:
    """One process and what it has seen of the Lease."""

    def __init__(self, leases: Leases, identity: str) -> None:
        self.identity = identity
        self.holder = ""
        """As last seen."""
        self.renewed_s = 0.0
        """When the last request that took or renewed it was sent."""
        self._leases = leases
        self._version: str | None = None
        self._seen_s = 0.0

    async def tries(self) -> bool:
        """Takes or renews the Lease; false when another has it, or the API server does not answer in time."""
        sent_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(CALL_S):
                taken = await self._take()
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease: %s", str(error) or "no answer in time")
            return False
        if taken:
            self.renewed_s = sent_s
        return taken

    async def _take(self) -> bool:
        body = await self._leases.read()
        self._look(body)
        if self.holder not in ("", self.identity) and not self._has_run_out(body):
            return False
        written = await self._leases.write(self._claim(body, self.identity))
        self._look(written or body)
        return written is not None

    def _look(self, body: Json | None) -> None:
        self.holder = (body or {}).get("spec", {}).get("holderIdentity") or ""
        version = (body or {}).get("metadata", {}).get("resourceVersion")
        if version != self._version:
            self._version, self._seen_s = version, asyncio.get_running_loop().time()

    def _has_run_out(self, body: Json | None) -> bool:
        """Whether the holder has let its own duration pass without a change that we saw."""
        duration_s = (body or {}).get("spec", {}).get("leaseDurationSeconds", DURATION_S)
        return bool(asyncio.get_running_loop().time() - self._seen_s > duration_s)

    def _claim(self, body: Json | None, holder: str) -> Json:
        old: Json = (body or {}).get("spec", {})
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = old.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": now if changes else old.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": old.get("leaseTransitions", 0) + (1 if changes and body else 0),
        }
        return {**(body or {}), "spec": spec}

    async def gives_back(self) -> None:
        """Lets the next one in at once. Best effort: without it the Lease runs out by itself."""
        try:
            async with asyncio.timeout(CALL_S):
                body = await self._leases.read()
                if body is not None and body["spec"].get("holderIdentity") == self.identity:
                    await self._leases.write(self._claim(body, ""))
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease was not given back and runs out by itself: %s", error)
