"""May this process act? Only while it holds the Lease, so two operators never act at the same time.

The holder renews the Lease every RETRY_S. A holder that could not renew it for RENEW_S stops acting. Another process
may take the Lease only after DURATION_S, which is longer. Each process measures by its own monotonic clock from the
moment at which it saw the Lease change, so different clocks do no harm. If two processes write at the same time, the
Lease's resourceVersion lets only one succeed. A holder that shuts down releases the Lease, and the next process takes
over at once.
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
LONGEST_PAUSE_S = 5
"""The API server may ask for a longer pause, but a process that waits must see in time that the holder is gone, and a
holder must renew the Lease."""
CALL_S = 4
"""Time limit of one request to the API server: a hanging request must not hide that the holder's time is over."""


class LostError(Exception):
    """The Lease could not be renewed: this process must not act any more."""


class LeaseStore(Protocol):
    """One Lease at the API server. Both methods raise ClusterError."""

    async def read(self) -> Json | None: ...

    async def write(self, body: Json) -> Json | None:
        """Creates or replaces the Lease; None when another process wrote or deleted it first."""


async def hold(
    leases: LeaseStore,
    *,
    identity: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    answered: Callable[[int | None], None] = lambda _: None,
) -> None:
    """Waits for the Lease, runs `work` while it is held, and releases it when `work` ends. Calls `answered` for each answer
    of the API server, with its HTTP status if that is an error.

    When the Lease is lost, cancels `work` and raises LostError. Errors of `work` are raised unchanged.
    """
    candidate = _Candidate(leases, identity, answered)
    while not await candidate.try_to_hold():
        await asyncio.sleep(candidate.pause_s)
    log.info("%s holds the Lease", identity)
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(_renew(candidate))
            working = group.create_task(work())
            working.add_done_callback(lambda _: renewing.cancel())
    except* Exception as errors:
        raise errors.exceptions[0] from errors
    finally:
        await candidate.release()


async def _renew(candidate: "_Candidate") -> None:
    """Renews the Lease; raises LostError at the latest RENEW_S after the last renewal, even when a request hangs."""
    while True:
        try:
            async with asyncio.timeout_at(candidate.renewed_at_s + RENEW_S):
                await _renew_once(candidate)
        except TimeoutError:
            raise LostError(f"the Lease could not be renewed for {RENEW_S} s") from None


async def _renew_once(candidate: "_Candidate") -> None:
    while True:
        await asyncio.sleep(candidate.pause_s)
        if await candidate.try_to_hold():
            return
        if candidate.holder != candidate.identity:
            raise LostError(f"the Lease is held by {candidate.holder or 'no process'} now")


class _Candidate:
    """One process, and the Lease as it last saw it."""

    def __init__(self, leases: LeaseStore, identity: str, answered: Callable[[int | None], None]) -> None:
        self.identity = identity
        self._answered = answered
        self.pause_s = float(RETRY_S)
        """Time until the next attempt."""
        self.holder = ""
        """The holder that this process last saw."""
        self.renewed_at_s = 0.0
        """When the last successful request for the Lease was sent."""
        self._leases = leases
        self._body: Json | None = None
        self._version: str | None = None
        self._seen_at_s = 0.0

    async def try_to_hold(self) -> bool:
        """Takes or renews the Lease; false when another process holds it, or when the API server answers with an error
        or not in time."""
        sent_at_s = asyncio.get_running_loop().time()
        self.pause_s = float(RETRY_S)
        try:
            async with asyncio.timeout(CALL_S):
                taken = await self._take()
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease: %s", str(error) or "no answer in time")
            if isinstance(error, ClusterError):
                self.pause_s = max(self.pause_s, min(error.retry_after_s, LONGEST_PAUSE_S))
                if error.status is not None:
                    self._answered(error.status)
            return False
        self._answered(None)
        if taken:
            self.renewed_at_s = sent_at_s
        return taken

    async def _take(self) -> bool:
        if self.holder == self.identity and self._body is not None:  # a renewal needs no read
            written = await self._leases.write(self._claim(self._body, self.identity))
            self._body = None
            if written is not None:
                self._observe(written)
                return True
        body = await self._leases.read()
        self._observe(body)
        if self.holder not in ("", self.identity) and not self._is_expired(body):
            return False
        written = await self._leases.write(self._claim(body, self.identity))
        self._observe(written or body)
        return written is not None

    def _observe(self, body: Json | None) -> None:
        self._body = body
        self.holder = (body or {}).get("spec", {}).get("holderIdentity") or ""
        version = (body or {}).get("metadata", {}).get("resourceVersion")
        if version != self._version:
            self._version, self._seen_at_s = version, asyncio.get_running_loop().time()

    def _is_expired(self, body: Json | None) -> bool:
        """Whether the Lease has not changed for the duration that its holder states."""
        duration_s = (body or {}).get("spec", {}).get("leaseDurationSeconds", DURATION_S)
        return bool(asyncio.get_running_loop().time() - self._seen_at_s > duration_s)

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

    async def release(self) -> None:
        """Releases the Lease so that the next process can take it at once. If this fails, the Lease expires."""
        try:
            async with asyncio.timeout(CALL_S):
                body = await self._leases.read()
                if body is not None and body["spec"].get("holderIdentity") == self.identity:
                    await self._leases.write(self._claim(body, ""))
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease was not released and will expire: %s", error)
