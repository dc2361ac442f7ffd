"""A pool's gateways, as steering sees them: has a person overridden the policy, and do they follow the decided one?

Asked and told through any one gateway's admin port; the gateways share both through their store, where an override
also has its expiry: one truth. When no gateway answers, the answer is "as last seen", until its time is over: an override
neither starts nor ends because a gateway restarts.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from tidegate_policy.steer import steering_loop

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=3.0)
MAX_REASON = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    policy: str
    source: str
    reason: str
    alpha: float
    ends_at_s: float | None
    """When the policy's time is over, by the clock given; None = it has no end."""


class GatewayAdmin:
    """The admin API of the gateways at one address."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds of the wall clock."""
        self._session = session
        self._url = url
        self._clock = clock
        self._seen: _Seen | None = None

    @property
    def has_answered(self) -> bool:
        """Whether a gateway has ever answered; until one has, nobody knows of an override."""
        return self._seen is not None

    @property
    def alpha(self) -> float | None:
        """The weight of speed against load that the gateways use, as last seen."""
        return None if self._seen is None else self._seen.alpha

    async def override(self) -> steering_loop.Override | None:
        """What a person has set; None when nobody has, its time is over, or no gateway `has_answered`."""
        try:
            async with self._session.get(f"{self._url}/admin/state", timeout=TIMEOUT) as answer:
                answer.raise_for_status()
                state = await answer.json()
            policy = state["policy"]
            left_s = policy["left_s"]
            self._seen = _Seen(
                policy=policy["name"],
                source=policy["source"],
                reason=policy["reason"],
                alpha=float(state["dispatch"]["alpha"]),
                ends_at_s=None if left_s is None else self._clock() + float(left_s),
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            log.debug("%s does not tell its state: %r", self._url, error)
        seen = self._seen
        if (
            seen is None
            or seen.source != "override"
            or (seen.ends_at_s is not None and self._clock() >= seen.ends_at_s)
        ):
            return None
        return steering_loop.Override(policy=seen.policy, reason=seen.reason, ends_at_s=seen.ends_at_s)

    async def follow(self, policy: str, reason: str) -> None:
        """Makes `policy` the order of the gateways' own waiting queues, unless it is or a person has set another.

        A failure is left to the next look: gateways only queue what engines have no room for.
        """
        seen = self._seen
        if seen is None or seen.source == "override" or (seen.policy, seen.source) == (policy, "steered"):
            return
        told = {"policy": policy, "reason": reason[:MAX_REASON], "source": "steered"}
        try:
            async with self._session.put(f"{self._url}/admin/policy", json=told, timeout=TIMEOUT) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s does not take %s: %r", self._url, policy, error)
