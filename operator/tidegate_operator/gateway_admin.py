"""A client of a pool's gateways: reads a manual override of the policy, and sets the decided policy.

The override of any one gateway is enough, because the gateways share the override, its expiry and the policy through
their store. While no gateway answers, the last answer counts until the override expires. So an override neither starts
nor ends because a gateway restarts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

import aiohttp

from tidegate_control import pool_token
from tidegate_operator import canary_figures, error_budget, gateway_loads, store_status
from tidegate_operator.spec import Json
from tidegate_policy.rollout.side_by_side import Service
from tidegate_policy.steer import steering_loop

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=3.0)
MAX_REASON = 256
"""Characters of a reason, and of what is expected."""
DIVIDED_S = 300.0
"""The time for which a division of calls holds unless it is renewed."""
T = TypeVar("T")
UNUSABLE = (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""The gateway does not answer, or its answer cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    policy: str
    source: str
    reason: str
    alpha: float | None
    ends_at_s: float | None
    """When the override ends, by the given clock; None when it has no end."""


class GatewayAdmin:
    """Calls the admin API of one pool's gateways. `gateways` and `addresses` are host:port of their admin ports."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        token: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Calls carry `token`. `clock` gives seconds of the wall clock."""
        self.rejects_token = False
        """Whether a gateway rejected the token of the last call."""
        self.answers = True
        """Whether every gateway answered the last `ask`, with an error or without one."""
        self._headers = pool_token.header(token)
        self._session = session
        self._clock = clock
        self._seen: _Seen | None = None
        self._states: dict[str, Json] = {}
        """The state of each gateway, as the last `ask` found it; gateways whose policy cannot be read are absent."""
        self._policies: dict[str, str] = {}
        """The policy of each gateway, as the last `ask` found it; none after a switch."""

    @property
    def has_answered(self) -> bool:
        """Whether a gateway has ever answered; until then it is unknown whether there is an override."""
        return self._seen is not None

    @property
    def alpha(self) -> float | None:
        """The weight of speed against load that a gateway last reported; None where its dispatch rule reads none."""
        return None if self._seen is None else self._seen.alpha

    @property
    def stores(self) -> dict[str, bool | None]:
        """Whether each gateway reaches the store, as the last `ask` found it; None where its state does not tell."""
        return {address: store_status.parse(state) for address, state in self._states.items()}

    async def ask(self, gateways: Collection[str]) -> None:
        """Reads the state of each gateway. `override`, `targets`, `others` and `stores` tell what it found."""
        self.answers = True
        found = await _answers(
            gateways, lambda address: self._state_of(address, lambda state: (state, self._read(state)))
        )
        self._states = {address: state for address, (state, _) in found.items()}
        self._policies = {address: seen.policy for address, (_, seen) in found.items()}
        if found:
            self._seen = found[self._spokesman()][1]

    def _spokesman(self) -> str:
        """One of the gateways that were found; one that does not reach the store knows of no change elsewhere."""
        return next(
            (address for address, reaches in self.stores.items() if reaches is not False), next(iter(self._states))
        )

    def _read(self, state: Json) -> _Seen:
        policy, alpha = state["policy"], state["dispatch"]["alpha"]
        return _Seen(
            policy=policy["name"],
            source=policy["source"],
            reason=policy["reason"],
            alpha=None if alpha is None else float(alpha),
            ends_at_s=None if policy["left_s"] is None else self._clock() + float(policy["left_s"]),
        )

    def override(self) -> steering_loop.Override | None:
        """The manual override; None when there is none, when it has expired, or when no gateway `has_answered`."""
        seen = self._seen
        if (
            seen is None
            or seen.source != "override"
            or (seen.ends_at_s is not None and self._clock() >= seen.ends_at_s)
        ):
            return None
        return steering_loop.Override(policy=seen.policy, reason=seen.reason, ends_at_s=seen.ends_at_s)

    def targets(self) -> dict[str, dict[str, error_budget.Counts]]:
        """By gateway and class: the calls with a target since the gateway started, as the last `ask` found them. Gateways
        that do not tell are absent."""
        found = {}
        for address, state in self._states.items():
            try:
                found[address] = {
                    name: error_budget.Counts(int(seen["met"]), int(seen["with_target"]))
                    for name, seen in state["targets"].items()
                }
            except UNUSABLE as error:
                log.debug("%s does not report its targets: %r", address, error)
        return found

    async def loads(self, addresses: Collection[str]) -> dict[str, gateway_loads.GatewayLoad]:
        """By gateway: its load. Gateways that do not answer are absent."""
        return await _answers(addresses, lambda address: self._state_of(address, gateway_loads.parse))

    async def services(self, addresses: Collection[str]) -> dict[str, dict[str, Service]]:
        """By gateway and engine: how the engine serves. Gateways that do not answer are absent."""
        return await _answers(addresses, lambda address: self._state_of(address, canary_figures.parse))

    async def divide(self, addresses: Collection[str], engines: Collection[str], weight: int | None) -> None:
        """Has each gateway send `weight` percent of the calls to these engines; None = no division. A gateway that does
        not answer is asked again at the next observation."""
        await asyncio.gather(*(self._divide(address, engines, weight) for address in addresses))

    async def _divide(self, address: str, engines: Collection[str], weight: int | None) -> None:
        body = {"weight": None} if weight is None else {"engines": [*engines], "weight": weight, "for_s": DIVIDED_S}
        try:
            url = f"http://{address}/admin/rollout"
            async with self._session.put(url, json=body, headers=self._headers, timeout=TIMEOUT) as answer:
                self._note(answer)
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s does not divide its calls: %r", address, error)

    async def _state_of(self, address: str, parse: Callable[[Json], T]) -> T | None:
        try:
            url = f"http://{address}/admin/state"
            async with self._session.get(url, headers=self._headers, timeout=TIMEOUT) as answer:
                self._note(answer)
                answer.raise_for_status()
                return parse(await answer.json())
        except UNUSABLE as error:
            if isinstance(error, (TimeoutError, OSError, aiohttp.ClientConnectionError)):
                self.answers = False
            log.debug("%s does not report its state: %r", address, error)
            return None

    def others(self, policies: Collection[str]) -> dict[str, str]:
        """The gateways that had another policy than `policies` at the last `ask`, by address. There are none after a
        switch, until the next `ask`."""
        return {address: policy for address, policy in self._policies.items() if policy not in policies}

    async def follow(self, policy: str, reason: str, *, alternatives: Sequence[str] = (), expected: str = "") -> None:
        """Sets `policy` for the gateways' own queues, unless it is in force for this reason or a person has set another.

        The next observation repeats a failed call. A short delay is harmless, because gateways queue only the calls
        that engines have no room for.
        """
        seen = self._seen
        reason = reason[:MAX_REASON]
        known = None if seen is None else (seen.policy, seen.source, seen.reason)
        if seen is None or not self._states or seen.source == "override" or known == (policy, "steered", reason):
            return
        address = self._spokesman()
        body: Json = {"policy": policy, "reason": reason, "source": "steered"}
        explained = {**body, "alternatives": [*alternatives], "expected": expected[:MAX_REASON]}
        try:
            if await self._put_policy(address, explained) == HTTPStatus.BAD_REQUEST:
                await self._put_policy(address, body)  # a gateway of an earlier version knows no other fields
            if seen.policy != policy:
                self._policies = {}  # what the gateways had before says nothing of whether they follow
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("%s does not accept policy %s: %r", address, policy, error)

    async def _put_policy(self, address: str, body: Json) -> int:
        """The status of the answer. Raises what aiohttp raises, for every error but 400 too."""
        url = f"http://{address}/admin/policy"
        async with self._session.put(url, json=body, headers=self._headers, timeout=TIMEOUT) as answer:
            self._note(answer)
            if answer.status != HTTPStatus.BAD_REQUEST or "expected" not in body:
                answer.raise_for_status()
            return answer.status

    def _note(self, answer: aiohttp.ClientResponse) -> None:
        rejects = answer.status == HTTPStatus.UNAUTHORIZED
        if rejects and not self.rejects_token:
            log.warning("%s rejects the token of the pool", answer.url.origin())
        self.rejects_token = rejects


async def _answers(addresses: Collection[str], ask: Callable[[str], Awaitable[T | None]]) -> dict[str, T]:
    """By address: the answers of those gateways that answer."""
    found = await asyncio.gather(*map(ask, addresses))
    return {address: answer for address, answer in zip(addresses, found, strict=True) if answer is not None}
