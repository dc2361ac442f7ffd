"""The HTTP ports: which paths exist, how many clients may be connected, and how a port closes without a reset.

Routing is an allow-list: a path that is not in the table does not exist. `http_connection` reads and writes the bytes of
one client; `http_api` and `admin_api` bring the handlers.
"""

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from tidegate_gateway import gateway_settings, loop_steps, reading_turns, tenant_budget
from tidegate_gateway.edge import (
    client_addresses,
    costly_requests,
    http_connection,
    http_messages,
    listening_port,
    tls_handshake,
    unread_answers,
)
from tidegate_gateway.openai import http_headers
from tidegate_gateway.openai.error_table import BadRequest

Handler = Callable[..., Awaitable[http_messages.Response | None]]
"""Takes the request, and the named groups of its route's path. The handler of a route that streams takes the connection
after the request, and gives None if it has written a stream."""

LAST_REQUEST_S = 1.0
"""Time for connections made before the port closed to bring their request."""
LAST_BYTES_S = 1.0
"""Time for complete answers to reach their clients."""
STARTS = 8
"""Requests that begin in one turn of the event loop, so that many at a time do not make a turn long."""
LINGERING = 512
"""Connections of rejected requests that stay open until their clients have seen the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    """`{name}` stands for one path segment, `{name...}` for one or more."""
    handler: Handler
    streams: bool = False
    """The answer may be a stream."""
    without_key: bool = False
    """Callers need no API key."""
    body_bytes: int | None = None
    """The size of a body; None = `limits.body_bytes`."""
    is_call: bool = False
    """The body is the JSON of a call for an engine."""


Guard = Callable[[http_messages.Request, Route], None]
"""Raises `GatewayError` for a request that must not come in, before its body is read. It may change the headers."""


class Routes:
    """The paths that exist."""

    def __init__(self, routes: list[Route]) -> None:
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        self._known = ", ".join(dict.fromkeys(route.path.replace("...", "") for route in routes))
        for route in routes:
            self._methods(route.path)[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """The route and its path arguments; HEAD is GET, whose body stays here. Raises `BadRequest`."""
        methods, arguments = self._fixed.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                if match := pattern.fullmatch(path):
                    methods, arguments = (
                        candidates,
                        {name: _decoded(value) for name, value in match.groupdict().items()},
                    )
                    break
        path = path.replace(http_messages.ENCODED_SLASH, "%2F")
        if methods is None:
            raise BadRequest(f"there is no {path[:80]} here; there is {self._known}", code="not_found")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise BadRequest(f"{path[:80]} takes {allowed}, not {method[:16]}", code="method_not_allowed")
        return route, arguments

    def _methods(self, path: str) -> dict[str, Route]:
        if "{" not in path:
            return self._fixed.setdefault(path, {})
        text = re.sub(r"\{(\w+)\.\.\.\}", r"(?P<\1>.+)", path)
        pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", text))
        for known, methods in self._patterns:
            if known == pattern:
                return methods
        self._patterns.append((pattern, {}))
        return self._patterns[-1][1]


class Server:
    """Serves `routes`. It is the protocol factory of a listening socket."""

    def __init__(
        self,
        routes: Routes,
        limits: gateway_settings.Limits,
        *,
        leaving: Callable[[], bool],
        guard: Guard | None = None,
        bodies: tenant_budget.TenantBudget | None = None,
        encryption: ssl.SSLContext | None = None,
    ) -> None:
        """While `leaving`, each connection is closed after its next answer. `bodies` counts the bytes of bodies; without it
        the port has a budget of its own. With `encryption` each connection begins with TLS."""
        self._guard = guard
        self.encryption = encryption
        self.limits = limits
        self.connections: set[http_connection.Connection] = set()
        self.unoccupied: dict[http_connection.Connection, None] = {}
        """The connections without a whole request, those that wait longest first for its head, or for its body."""
        self._lingering: dict[http_connection.Connection, None] = {}
        self._starts, self._following = loop_steps.TenantTurns(STARTS), loop_steps.TenantTurns(STARTS)
        self.endings = loop_steps.Endings()
        self._addresses = client_addresses.ClientAddresses(limits.connections_per_address)
        self.turns = reading_turns.ReadingTurns()
        self.handshakes = tls_handshake.HandshakeLine(self.turns)
        self.unread = unread_answers.UnreadAnswers()
        self.bodies = bodies or tenant_budget.TenantBudget(limits.bodies_bytes)
        self._costly = costly_requests.CostlyRequests()
        self._routes = routes
        self._leaving = leaving

    def __call__(self) -> http_connection.Connection:
        return http_connection.Connection(self)

    @property
    def leaving(self) -> bool:
        return self._leaving()

    def opened(self, connection: http_connection.Connection) -> bool:
        """A client connected; False if there are too many of its address. If there are too many in all, the connection
        that has waited longest for a head or a body is closed, so idle and slow connections keep no client out."""
        has_room = self._addresses.has_room(connection.address)
        self.connections.add(connection)
        self._addresses.opened(connection.address)
        if not has_room:
            return False
        if len(self.connections) > self.limits.connections:
            if not self.unoccupied:
                return False
            oldest = next(iter(self.unoccupied))
            del self.unoccupied[oldest]
            oldest.close()
        self.unoccupied[connection] = None
        return True

    def waits(self, connection: http_connection.Connection) -> None:
        """The connection waits from now on for the head of a request, or for its body."""
        self.unoccupied.pop(connection, None)
        self.unoccupied[connection] = None

    def lingers(self, connection: http_connection.Connection) -> None:
        """The connection has its last answer and stays open until its client has seen it. The oldest of too many is cut."""
        self._lingering[connection] = None
        if len(self._lingering) > LINGERING:
            oldest = next(iter(self._lingering))
            del self._lingering[oldest]
            oldest.abort()

    def closed(self, connection: http_connection.Connection) -> None:
        """A connection is gone."""
        self._lingering.pop(connection, None)
        self.connections.discard(connection)
        self.unoccupied.pop(connection, None)
        self._addresses.closed(connection.address)

    def find(self, request: http_messages.Request) -> None:
        """Sets the route of a request before its body is read. Raises `GatewayError` for a path that does not exist, and
        for a request that must not come in."""
        request.route = route, _ = self._routes.find(request.method, request.segments)
        if self._guard is not None:
            self._guard(request, route)

    async def turn_of(self, request: http_messages.Request, *, follows: bool) -> None:
        """Returns when the request may begin. Tenants take turns; probes and the files of the page take none. Requests that
        waited behind another one of their connection, or follow a wrong one (`follows`), have turns of their own."""
        if follows or request.route is None or not request.route[0].without_key:
            await (self._following if follows else self._starts).next(http_headers.named_tenant(request.headers))

    async def answer(
        self, request: http_messages.Request, connection: http_connection.Connection
    ) -> http_messages.Response | None:
        """The answer to a request; None if the handler has written a stream. Raises `GatewayError`."""
        if request.route is None:
            raise AssertionError("the listener answers requests whose route it has found")
        await self._costly.turn(request)
        route, arguments = request.route
        handler: Handler = route.handler
        return await (handler(request, connection, **arguments) if route.streams else handler(request, **arguments))


def _decoded(value: str) -> str:
    return value.replace(http_messages.ENCODED_SLASH, "/")


async def close(listening: listening_port.ListeningPort, server: Server) -> None:
    """Stops listening without a reset: clients that have connected by now are answered if they send soon."""
    await listening.close()
    await _until(lambda: not any(connection.unused for connection in server.connections), LAST_REQUEST_S)
    for connection in list(server.connections):
        if connection.idle:
            connection.close()
    await _until(lambda: not server.connections, LAST_BYTES_S)
    tasks = [connection.task for connection in server.connections if connection.task is not None]
    for connection in list(server.connections):
        connection.abort()
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_BYTES_S)


async def _until(done: Callable[[], bool], within_s: float) -> None:
    """Waits until `done`, or until the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not done():
                await asyncio.sleep(0.01)
