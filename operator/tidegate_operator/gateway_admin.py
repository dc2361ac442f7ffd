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

import orjson

from tidegate_control import bounded_http, pool_token
from tidegate_operator import canary_figures, error_budget, gateway_loads, store_status
from tidegate_operator.spec import Json
from tidegate_policy.rollout.side_by_side import Service
from tidegate_policy.steer import steering_loop

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
MOST_BYTES = 2 * 1024 * 1024
"""Of an answer. The state of a gateway with 256 engines has about half of it."""
MOST_PARTS = 65_536, 524_288
"""Objects and lists of an answer, and commas in it: what it costs to read it."""
MAX_REASON = 256
"""Characters of a reason, and of what is expected."""
DIVIDED_S = 300.0
"""The time for which a division of calls holds unless it is renewed."""
T = TypeVar("T")
UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""The gateway does not answer, or its answer cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    policy: str
    source: str
    reason: str
    alpha: float | None
    ends_at_s: float | None
    """When the override ends, by the given clock; None when it has no end."""
    reaches_store: bool | None
    targets: dict[str, error_budget.Counts] | None
    """By class; None where the gateway does not tell."""


class GatewayAdmin:
    """Calls the admin API of one pool's gateways. They are named by host:port of their admin ports."""

    def __init__(
        self,
        client: bounded_http.Client,
        *,
        namespace: str = "",
        token: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Gateways of one `namespace` share what `client` grants to one owner. Calls carry `token`. `clock` gives seconds
        of the wall clock."""
        self.rejects_token = False
        """Whether a gateway rejected the token of the last call."""
        self.answers = True
        """Whether every gateway answered the last `ask`, with an error or without one."""
        self._headers = pool_token.header(token)
        self._client, self._namespace = client, namespace
        self._clock = clock
        self._seen: _Seen | None = None
        self._found: dict[str, _Seen] = {}
        """What the last `ask` found at each gateway; those whose policy cannot be read are absent."""
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
        return {address: seen.reaches_store for address, seen in self._found.items()}

    async def ask(self, gateways: Collection[str]) -> None:
        """Reads the state of each gateway. `override`, `targets`, `others` and `stores` tell what it found."""
        self.answers = True
        self._found = await _answers(gateways, lambda address: self._state_of(address, self._read))
        self._policies = {address: seen.policy for address, seen in self._found.items()}
        if self._found:
            self._seen = self._found[self._spokesman()]

    def _spokesman(self) -> str:
        """One of the gateways that were found; one that does not reach the store knows of no change elsewhere."""
        return next(
            (address for address, reaches in self.stores.items() if reaches is not False), next(iter(self._found))
        )

    def _read(self, state: Json) -> _Seen:
        policy, alpha = state["policy"], state["dispatch"]["alpha"]
        return _Seen(
            policy=str(policy["name"])[:MAX_REASON],
            source=str(policy["source"])[:MAX_REASON],
            reason=str(policy["reason"])[:MAX_REASON],
            alpha=None if alpha is None else float(alpha),
            ends_at_s=None if policy["left_s"] is None else self._clock() + float(policy["left_s"]),
            reaches_store=store_status.parse(state),
            targets=_targets(state),
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
        return {address: seen.targets for address, seen in self._found.items() if seen.targets is not None}

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
            await self._request("PUT", address, "/admin/rollout", body)
        except (OSError, ValueError) as error:
            log.debug("%s does not divide its calls: %r", address, error)

    async def _state_of(self, address: str, parse: Callable[[Json], T]) -> T | None:
        try:
            answer = await self._request("GET", address, "/admin/state")
            return parse(_json(answer.body))
        except UNUSABLE as error:
            if isinstance(error, OSError):
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
        if seen is None or not self._found or seen.source == "override" or known == (policy, "steered", reason):
            return
        address = self._spokesman()
        body: Json = {"policy": policy, "reason": reason, "source": "steered"}
        explained = {**body, "alternatives": [*alternatives], "expected": expected[:MAX_REASON]}
        try:
            if await self._put_policy(address, explained) == HTTPStatus.BAD_REQUEST:
                await self._put_policy(address, body)  # a gateway of an earlier version knows no other fields
            if seen.policy != policy:
                self._policies = {}  # what the gateways had before says nothing of whether they follow
        except (OSError, ValueError) as error:
            log.debug("%s does not accept policy %s: %r", address, policy, error)

    async def _put_policy(self, address: str, body: Json) -> int:
        """The status of the answer. Raises OSError and ValueError, for every error but 400 too."""
        may_be = {HTTPStatus.BAD_REQUEST} if "expected" in body else frozenset[HTTPStatus]()
        return (await self._request("PUT", address, "/admin/policy", body, may_be=may_be)).status

    async def _request(
        self, method: str, address: str, path: str, body: Json | None = None, *, may_be: Collection[int] = ()
    ) -> bounded_http.Answer:
        """The answer, with status 200 or one that it `may_be`. Raises OSError and ValueError."""
        answer = await self._client.request(
            method,
            f"http://{address}{path}",
            headers=self._headers,
            body=None if body is None else orjson.dumps(body),
            most_bytes=MOST_BYTES,
            timeout_s=TIMEOUT_S,
            owner=self._namespace,
        )
        rejects = answer.status == HTTPStatus.UNAUTHORIZED
        if rejects and not self.rejects_token:
            log.warning("%s rejects the token of the pool", address)
        self.rejects_token = rejects
        if answer.status != HTTPStatus.OK and answer.status not in may_be:
            raise ValueError(f"status {answer.status}")
        return answer


def _json(body: bytes) -> Json:
    """The state in an answer. Raises ValueError, also for one that would take long to read."""
    objects, commas = MOST_PARTS
    if body.count(b"{") + body.count(b"[") > objects or body.count(b",") > commas:
        raise ValueError("the answer has too many parts")
    state: Json = orjson.loads(body)
    return state


def _targets(state: Json) -> dict[str, error_budget.Counts] | None:
    try:
        return error_budget.parse(state)
    except UNUSABLE:
        return None


async def _answers(addresses: Collection[str], ask: Callable[[str], Awaitable[T | None]]) -> dict[str, T]:
    """By address: the answers of those gateways that answer."""
    found = await asyncio.gather(*map(ask, addresses))
    return {address: answer for address, answer in zip(addresses, found, strict=True) if answer is not None}
