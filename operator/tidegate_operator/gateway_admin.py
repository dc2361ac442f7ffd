"""A client of a pool's gateways: reads a manual override of the policy, and sets the decided policy.

The admin port of any one gateway is enough, because the gateways share the override, its expiry and the policy through
their store. While no gateway answers, the last answer counts until the override expires. So an override neither starts
nor ends because a gateway restarts.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from tidegate_control import pool_token
from tidegate_operator import error_budget, gateway_loads
from tidegate_policy.steer import steering_loop

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=3.0)
MAX_REASON = 256
UNUSABLE = (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""The gateway does not answer, or its answer cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    policy: str
    source: str
    reason: str
    alpha: float
    ends_at_s: float | None
    """When the override ends, by the given clock; None when it has no end."""


class GatewayAdmin:
    """Calls the admin API of the gateways at one address."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        token: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Calls carry `token`. `clock` gives seconds of the wall clock."""
        self.rejects_token = False
        """Whether a gateway rejected the token of the last call."""
        self._headers = pool_token.header(token)
        self._session = session
        self._url = url
        self._clock = clock
        self._seen: _Seen | None = None
        self._policies: dict[str, str] = {}
        """The policy of each gateway, as the last `targets` found it."""

    @property
    def has_answered(self) -> bool:
        """Whether a gateway has ever answered; until then it is unknown whether there is an override."""
        return self._seen is not None

    @property
    def alpha(self) -> float | None:
        """The weight of speed against load that a gateway last reported."""
        return None if self._seen is None else self._seen.alpha

    async def override(self) -> steering_loop.Override | None:
        """The manual override; None when there is none, when it has expired, or when no gateway `has_answered`."""
        try:
            url = f"{self._url}/admin/state"
            async with self._session.get(url, headers=self._headers, timeout=TIMEOUT) as answer:
                self._note(answer)
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
        except UNUSABLE as error:
            log.debug("%s does not report its state: %r", self._url, error)
        seen = self._seen
        if (
            seen is None
            or seen.source != "override"
            or (seen.ends_at_s is not None and self._clock() >= seen.ends_at_s)
        ):
            return None
        return steering_loop.Override(policy=seen.policy, reason=seen.reason, ends_at_s=seen.ends_at_s)

    async def targets(self, addresses: Collection[str]) -> dict[str, dict[str, error_budget.Counts]]:
        """By gateway and class: the calls with a target since the gateway started. `addresses` are host:port of the admin
        ports of single gateways; those that do not answer are absent."""
        self._policies = {}
        found = await asyncio.gather(*map(self._targets_of, addresses))
        return {address: counts for address, counts in zip(addresses, found, strict=True) if counts is not None}

    async def _targets_of(self, address: str) -> dict[str, error_budget.Counts] | None:
        try:
            url = f"http://{address}/admin/state"
            async with self._session.get(url, headers=self._headers, timeout=TIMEOUT) as answer:
                answer.raise_for_status()
                state = await answer.json()
            self._policies[address] = str(state["policy"]["name"])
            return {
                name: error_budget.Counts(int(seen["met"]), int(seen["with_target"]))
                for name, seen in state["targets"].items()
            }
        except UNUSABLE as error:
            log.debug("%s does not report its targets: %r", address, error)
            return None

    async def loads(self, addresses: Collection[str]) -> dict[str, gateway_loads.GatewayLoad]:
        """By gateway: its load. Gateways that do not answer are absent. `addresses` are those of `targets`."""
        found = await asyncio.gather(*map(self._load_of, addresses))
        return {address: load for address, load in zip(addresses, found, strict=True) if load is not None}

    async def _load_of(self, address: str) -> gateway_loads.GatewayLoad | None:
        try:
            url = f"http://{address}/admin/state"
            async with self._session.get(url, headers=self._headers, timeout=TIMEOUT) as answer:
                self._note(answer)
                answer.raise_for_status()
                return gateway_loads.parse(await answer.json())
        except UNUSABLE as error:
            log.debug("%s does not report its load: %r", address, error)
            return None

    def others(self, policies: Collection[str]) -> dict[str, str]:
        """The gateways that had another policy than `policies` at the last `targets`, by address. There are none after a
        switch, until the next `targets`."""
        return {address: policy for address, policy in self._policies.items() if policy not in policies}

    async def follow(self, policy: str, reason: str) -> None:
        """Sets `policy` for the gateways' own queues, unless it is in force or a person has set another.

        The next observation repeats a failed call. A short delay is harmless, because gateways queue only the calls
        that engines have no room for.
        """
        seen = self._seen
        if seen is None or seen.source == "override" or (seen.policy, seen.source) == (policy, "steered"):
            return
        body = {"policy": policy, "reason": reason[:MAX_REASON], "source": "steered"}
        try:
            url = f"{self._url}/admin/policy"
            async with self._session.put(url, json=body, headers=self._headers, timeout=TIMEOUT) as answer:
                self._note(answer)
                answer.raise_for_status()
            self._policies = {}  # what the gateways had before says nothing of whether they follow
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s does not accept policy %s: %r", self._url, policy, error)

    def _note(self, answer: aiohttp.ClientResponse) -> None:
        rejects = answer.status == HTTPStatus.UNAUTHORIZED
        if rejects and not self.rejects_token:
            log.warning("%s rejects the token of the pool", self._url)
        self.rejects_token = rejects
