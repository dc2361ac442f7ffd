"""An HTTP listener that bounds what a client can do to it, over aiohttp's low-level server.

aiohttp's parser is strict (sizes and number of headers, control characters, contradicting lengths). This module adds a time
limit for headers, for bodies and for answers that the client does not read, a bound on connections and bodies, and an
OpenAI error object for every error, including those of the parser. Routing is an allow-list: a path that is not in
the table does not exist. `http_api` and `admin_api` bring the handlers. `tests/gateway/test_aiohttp_compat.py` names
the private hooks of aiohttp that are used here.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import http_exceptions, web, web_protocol

from tidegate_gateway import gateway_settings
from tidegate_gateway.openai import error_table
from tidegate_gateway.openai.error_table import BadRequest

logger = logging.getLogger("tidegate.gateway")

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Takes the request, and the named groups of its route's path."""

PATH_BYTES, HEADER_BYTES, HEADERS = 8000, 8190, 128
"""Longest path, longest header, most headers. The parser tells a long path from a long header by its limit only, so the
two differ."""
TAKEN_BYTES = 64 * 1024
"""The bytes of an answer that a client must take within `limits.write_s`, or all that are left."""
LAST_REQUEST_S = 1.0
"""Time for connections made before the port closed to bring their request."""
LAST_BYTES_S = 1.0
"""Time for complete answers to reach their clients."""
LINGER_S = 2.0
"""How long the rest of a rejected body is still read, so that the client sees the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    """`{name}` stands for one path segment, `{name...}` for one or more."""
    handler: Handler


class Routes:
    """The paths that exist."""

    def __init__(self, routes: list[Route]) -> None:
        self._fixed: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Handler]]] = []
        self._known = ", ".join(dict.fromkeys(route.path.replace("...", "") for route in routes))
        for route in routes:
            self._methods(route.path)[route.method] = route.handler

    def find(self, method: str, path: str) -> tuple[Handler, Mapping[str, str]]:
        """The handler and its path arguments; HEAD is GET, whose body stays here. Raises `BadRequest`."""
        methods, arguments = self._fixed.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                if match := pattern.fullmatch(path):
                    methods, arguments = candidates, match.groupdict()
                    break
        if methods is None:
            raise BadRequest(f"there is no {path[:80]} here; there is {self._known}", code="not_found")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            raise BadRequest(f"{path[:80]} takes {allowed}, not {method[:16]}", code="method_not_allowed")
        return handler, arguments

    def _methods(self, path: str) -> dict[str, Handler]:
        if "{" not in path:
            return self._fixed.setdefault(path, {})
        text = re.sub(r"\{(\w+)\.\.\.\}", r"(?P<\1>.+)", path)
        pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", text))
        for known, methods in self._patterns:
            if known == pattern:
                return methods
        self._patterns.append((pattern, {}))
        return self._patterns[-1][1]


class Connection(web_protocol.RequestHandler):
    """One client connection. Bytes that are not HTTP get our error object too, and a client that does not read is cut."""

    __slots__ = ("_write_s",)

    def __init__(self, server: "Server", *, write_s: float, **options: Any) -> None:
        super().__init__(server, **options)
        self._write_s = write_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport is not None:
            self.transport.set_write_buffer_limits(0)  # an answer has left when the kernel has all of it

    async def _drain_helper(self) -> None:
        """Waits for the client, in every write of every answer. Raises `ConnectionResetError` when it does not read."""
        while (transport := self.transport) is not None:
            left = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(self._write_s):
                    return await super()._drain_helper()
            except TimeoutError as error:
                self._drain_waiter = None  # cancelled by the timeout; the next wait needs one that is not
                if left - transport.get_write_buffer_size() < TAKEN_BYTES:
                    transport.abort()
                    raise ConnectionResetError("the client does not read its answer") from error
        raise ConnectionResetError("the connection is lost")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status == 400:
            error = _parsers_error(exc, message or "")
        else:
            logger.error("request %s failed", request.path, exc_info=exc)
            error = error_table.GatewayError("internal_error", "the gateway failed on this request; its log says why")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; nothing can be added to it")
        response = error_response(error)
        response.force_close()
        return _named(request, response)


class Server(web.Server):
    """Serves `routes`; every handler's `GatewayError` becomes its response."""

    def __init__(self, routes: Routes, limits: gateway_settings.Limits, *, leaving: Callable[[], bool]) -> None:
        """While `leaving`, clients are asked not to use their connections again."""
        super().__init__(
            self._handle,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.idle_s,
            lingering_time=LINGER_S,
            auto_decompress=False,
            max_line_size=PATH_BYTES,
            max_field_size=HEADER_BYTES,
            max_headers=HEADERS,
        )
        self.silent: set[web_protocol.RequestHandler] = set()
        """Connections that have not brought a request yet."""
        self._routes = routes
        self._limits = limits
        self._leaving = leaving

    def __call__(self) -> web_protocol.RequestHandler:
        return Connection(self, write_s=self._limits.write_s, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web_protocol.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        else:
            self.silent.add(handler)

    def connection_lost(self, handler: web_protocol.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.silent.discard(handler)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._loop, client_max_size=self._limits.body_bytes
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.silent.discard(request.protocol)
        try:
            handler, arguments = self._routes.find(request.method, request.path)
            response = await handler(request, **arguments)
        except error_table.GatewayError as error:
            response = error_response(error)
        if self._leaving() and not response.prepared:
            response.force_close()
        return _named(request, response)


async def close(listening: asyncio.Server, server: Server) -> None:
    """Stops listening without a reset: clients that have connected by now are accepted, and answered if they send soon."""
    loop = asyncio.get_running_loop()
    doors = [socket.socket(fileno=os.dup(door.fileno())) for door in listening.sockets]
    listening.close()
    for door in doors:
        with door, contextlib.suppress(BlockingIOError):
            door.setblocking(False)
            while True:
                await loop.connect_accepted_socket(server, door.accept()[0])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_REQUEST_S):
            while server.silent:
                await asyncio.sleep(0.01)
    server.pre_shutdown()
    await server.shutdown(LAST_BYTES_S)


def error_response(error: error_table.GatewayError) -> web.Response:
    """The response for an error."""
    return web.Response(
        status=error.row.status, body=error.body(), content_type="application/json", headers=error.headers()
    )


def reply(value: object, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


async def body(request: web.BaseRequest, limits: gateway_settings.Limits) -> bytes:
    """The request's whole body. Raises `BadRequest` when it is too large, too slow or broken."""
    most = limits.body_bytes
    if (request.content_length or 0) > most:
        raise _too_large(most)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise BadRequest("compressed bodies are not supported; send the JSON uncompressed")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        if request.content.is_eof():
            return await request.read()  # the body came with the headers
        async with asyncio.timeout(limits.body_s):
            return await request.read()
    except TimeoutError as error:
        late = f"the body did not arrive within {limits.body_s:.3g} s; send it faster, or in smaller parts"
        raise BadRequest(late, code="request_timeout") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(most) from error
    except (web.RequestPayloadError, aiohttp.ClientError) as error:
        raise BadRequest("the body broke off") from error


def _too_large(most: int) -> BadRequest:
    return BadRequest(f"the body is larger than {most} bytes; send less text", code="body_too_large")


async def json_object(request: web.BaseRequest, limits: gateway_settings.Limits) -> dict[str, Any]:
    """The request's body as a JSON object; an empty body is an empty object. Raises `BadRequest`."""
    raw = await body(request, limits)
    try:
        value = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def _named(request: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    """The response with a request id: its own, else the client's if that is usable, else a new one."""
    if not response.prepared and "x-request-id" not in response.headers:
        given = request.headers.get("x-request-id", "")
        usable = 0 < len(given) <= 256 and given.isascii() and given.isprintable()
        response.headers["x-request-id"] = given if usable else f"tg-{secrets.token_hex(12)}"
    return response


_MALFORMED: dict[type, str] = {
    http_exceptions.InvalidHeader: "a header is malformed",
    http_exceptions.InvalidURLError: "the path is malformed",
    http_exceptions.BadHttpMethod: "the method is malformed, or the client speaks TLS, which this port does not",
    http_exceptions.BadStatusLine: "the first line must be METHOD /path HTTP/1.1",
}


def _parsers_error(problem: BaseException | None, message: str) -> error_table.GatewayError:
    """The parser's error without the bytes that caused it."""
    if isinstance(problem, http_exceptions.LineTooLong) and problem.args[1] == PATH_BYTES:
        return BadRequest(
            f"the path is longer than {PATH_BYTES} bytes; send long values in the body", code="path_too_long"
        )
    if isinstance(problem, http_exceptions.LineTooLong) or message.startswith("Too many headers"):
        return BadRequest(
            f"at most {HEADERS} headers of at most {HEADER_BYTES} bytes are allowed; send fewer or shorter ones",
            code="headers_too_large",
        )
    why = _MALFORMED.get(type(problem), re.sub(r"[^\x20-\x7e]", " ", message.partition(":\n")[0])[:120])
    return BadRequest(f"this is not a valid HTTP request: {why}")
