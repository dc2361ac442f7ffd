"""Is a failed call tried on another engine? (docs/decisions/0009)

A call is tried again only before its first token: a client must never receive two beginnings. After a lost connection or
an error no engine works on the call any more, so it gets a second attempt. A retry after a timeout may double the work of a
pool that is already slow, so such retries share a budget. A call that an engine rejects as wrong is tried again while that
engine is doubted (`outliers`); the engine works on it no longer.
"""

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """How an engine failed a call before its first token."""

    BUSY = "busy"
    """The engine's own queue is full. The engine is healthy."""
    GONE = "gone"
    """The connection failed: the engine works on the call no longer."""
    FAILED = "failed"
    """The engine answered with an error, or with what is no answer, and works on the call no longer."""
    LATE = "late"
    """The engine did not begin its answer in time. It may still work on the call."""
    REJECTED = "rejected"
    """The engine rejected the call as wrong, as it did the calls before: another engine is asked. It is blamed if that one
    answers the call."""
    TOO_LONG = "too-long"
    """An answer that is not streamed took longer than the gateway waits. The engine works, so it is not blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """How often a call is tried."""

    max_attempts: int = 2
    """Attempts of a call in all, where engines failed it."""
    max_busy_attempts: int = 4
    """Attempts of a call in all, where engines had no room."""
    share: float = 0.2
    """Retries under way, as a share of the calls at engines, from which on late calls are not tried again."""
    free: int = 3
    """Late calls are tried again in any case while fewer retries than this are under way."""


def retry(failure: Failure, *, attempt: int, retrying: int, inflight: int, settings: RetrySettings) -> bool:
    """Whether the call of the `attempt`-th attempt (from 1) is tried again.

    `retrying` is the number of calls whose retry has not answered yet; `inflight` is the number of calls at engines.
    """
    if failure is Failure.TOO_LONG:
        return False
    if failure is Failure.BUSY:
        return attempt < settings.max_busy_attempts
    if attempt >= settings.max_attempts:
        return False
    return failure is not Failure.LATE or retrying < max(settings.free, settings.share * inflight)


def blames_engine(failure: Failure) -> bool:
    """Whether the failure counts against the engine's health, and against what its cache is believed to hold."""
    return failure in (Failure.GONE, Failure.FAILED, Failure.LATE)
