"""The admin port: the gateway's state, and the policy, read and overridden. Loopback unless the settings say otherwise.

Beyond loopback its clients show the token of the pool, if there is one. On loopback they need none: they are processes of
this machine, and a person's browser and `tidegate policy` are among them.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Any

from tidegate_control import pool_token
from tidegate_gateway import access_settings, running_gateway
from tidegate_gateway.callers import caller
from tidegate_gateway.coordination import policy_choice
from tidegate_gateway.edge import http_api, http_listener, http_messages, state_snapshot, web_origins
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.dispatch import traffic_split
from tidegate_policy.model import EngineId

DIVIDED_S, LONGEST_DIVIDED_S = 300.0, 86400.0
"""The time after which a division of calls ends unless it is renewed, by default and at most."""
MOST_CHARACTERS = 256
"""Of the reason of a choice, and of what is expected of it."""
MOST_ALTERNATIVES, MOST_NAME = 32, 64
"""Policies that the steering loop compared, and the characters of a name."""
_PORT = re.compile(r":\d+$")


def _is_own_name(name: str, more: frozenset[str]) -> bool:
    """Whether a Host names this port: an address, or one of its names. A page of another site has the name of that site
    there, which may have no dots, or end like the name of a Service."""
    if name in more:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class AdminApi:
    """The handlers of the admin port."""

    def __init__(self, gateway: running_gateway.Gateway) -> None:
        self._gateway = gateway
        listen = gateway.settings.listen
        names = ("localhost", socket.gethostname(), listen.admin_host, *listen.admin_names)
        self._names = frozenset(map(str.lower, names))
        is_local = access_settings.LOOPBACK.fullmatch(listen.admin_host) is not None
        self._token = None if is_local else gateway.settings.auth.pool_token

    def routes(self) -> http_listener.Routes:
        route, public = http_listener.Route, http_api.HttpApi(self._gateway, takes_calls=False)
        return http_listener.Routes(
            [
                route(method="GET", path="/admin/state", handler=self._state),
                route(method="GET", path="/admin/policy", handler=self._policy),
                route(method="PUT", path="/admin/policy", handler=self._choose),
                route(method="PUT", path="/admin/rollout", handler=self._divide),
                route(method="GET", path="/metrics", handler=public.metrics),
                *public.page_routes(),
            ]
        )

    def guard(self, request: http_messages.Request, route: http_listener.Route) -> None:
        """Keeps away clients without the token, and web pages of other origins, also those that resolve their own name to
        this address. No page has the token, so where it is required every name will do. Raises `GatewayError`."""
        host, origin = request.header("host").lower(), request.header("origin").lower()
        name = host.rpartition(":")[0] if _PORT.search(host) else host
        if self._token is None and not _is_own_name(name.removesuffix("."), self._names):
            raise caller.forbidden(
                "the admin port does not have this host name; call it by its address, or set listen.adminNames",
                param="host",
            )
        if origin and not web_origins.is_own(origin, host):
            raise caller.forbidden("the admin port takes no requests of other origins", param="origin")
        if not route.without_key and (problem := pool_token.problem(self._token, request.headers)):
            raise caller.unauthenticated(f"{problem}: send it as Authorization: Bearer (docs/operations.md)")

    async def _state(self, request: http_messages.Request) -> http_messages.Response:
        return http_messages.reply(state_snapshot.snapshot(self._gateway))

    async def _policy(self, request: http_messages.Request) -> http_messages.Response:
        return http_messages.reply(self._shown())

    async def _choose(self, request: http_messages.Request) -> http_messages.Response:
        """`{"policy": name or null, "for_s"?: seconds, "reason"?: text, "source"?: "override" or "steered"}`. The steering
        loop also sends `alternatives`, the names of the policies that it compared, and `expected`, a text."""
        body = request.json_object()
        unknown = sorted(set(body) - {"policy", "for_s", "reason", "source", "alternatives", "expected"})
        if unknown or "policy" not in body:
            raise BadRequest(
                "send policy (a name, or null to take the override back), and for_s, reason, source if wanted"
            )
        name, for_s, reason = body["policy"], body.get("for_s"), body.get("reason", "")
        source = body.get("source", "override")
        if name is not None and not isinstance(name, str):
            raise BadRequest("policy must be a name, or null", param="policy")
        if for_s is not None and (isinstance(for_s, bool) or not isinstance(for_s, int | float)):
            raise BadRequest("for_s must be a number of seconds", param="for_s")
        alternatives, expected = body.get("alternatives", []), body.get("expected", "")
        for key, text in (("reason", reason), ("expected", expected)):
            if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
                raise BadRequest(f"{key} must be a text of at most {MOST_CHARACTERS} characters", param=key)
        if (
            not isinstance(alternatives, list)
            or len(alternatives) > MOST_ALTERNATIVES
            or not all(isinstance(each, str) and len(each) <= MOST_NAME for each in alternatives)
        ):
            raise BadRequest(
                f"alternatives must be at most {MOST_ALTERNATIVES} names of at most {MOST_NAME} characters",
                param="alternatives",
            )
        if source not in policy_choice.SOURCES:
            raise BadRequest("source must be override or steered", param="source")
        kind = policy_choice.SOURCES[policy_choice.SOURCES.index(source)]
        await self._gateway.policy.choose(
            kind, name, reason=reason, for_s=for_s, alternatives=tuple(alternatives), expected=expected
        )
        return http_messages.reply(self._shown())

    async def _divide(self, request: http_messages.Request) -> http_messages.Response:
        """`{"engines": names of the new engines, "weight": percent of the calls that they get, "for_s": seconds}`, or
        `{"weight": null}` for no division. The operator repeats it while it tests a new revision."""
        body = request.json_object()
        self._gateway.placements.divide(_split(body, self._gateway.clock()))
        return http_messages.reply({"rollout": state_snapshot.rollout(self._gateway)})

    def _shown(self) -> dict[str, Any]:
        return state_snapshot.policy(self._gateway)


def _split(body: Mapping[str, Any], now: float) -> traffic_split.TrafficSplit | None:
    """The division of calls that a body asks for. Raises `BadRequest`."""
    if unknown := sorted(set(body) - {"engines", "weight", "for_s"}):
        raise BadRequest(f"unknown field {unknown[0]}: send engines, weight and for_s", param=unknown[0])
    weight, engines, for_s = body.get("weight"), body.get("engines", []), body.get("for_s", DIVIDED_S)
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= 100:
        raise BadRequest("weight must be a whole number of percent from 0 to 100, or null", param="weight")
    if not isinstance(engines, list) or not all(isinstance(name, str) for name in engines):
        raise BadRequest("engines must be a list of names", param="engines")
    if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 < for_s <= LONGEST_DIVIDED_S:
        raise BadRequest(f"for_s must be a number of seconds up to {LONGEST_DIVIDED_S:g}", param="for_s")
    return traffic_split.TrafficSplit(
        engines=frozenset(map(EngineId, engines)), weight=weight, until_s=now + float(for_s)
    )
