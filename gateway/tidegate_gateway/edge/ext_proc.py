"""The gateway as the endpoint picker of an Envoy: `envoy.service.ext_proc.v3.ExternalProcessor` (docs/envoy.md).

Envoy opens a stream for each HTTP request. It sends the headers and the body, and gets the engine, the headers and the
body of the call for that engine, or the answer of a call that is shed. A call that waits holds its stream. Envoy
carries the answer's bytes, sends its headers here, and ends the stream with the answer. Requests that are no calls get
their answers here too.
"""

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import cast

from google.protobuf import descriptor, message

from tidegate_gateway import loop_steps, running_gateway
from tidegate_gateway.edge import (
    call_requests,
    costly_requests,
    ext_proc_messages,
    framing_errors,
    grpc_health_check,
    http2_server,
    http2_stream,
    http_api,
    http_listener,
    http_messages,
    message_entries,
    picker_conformance,
    self_signed,
    unread_answers,
)
from tidegate_gateway.lifecycle import handed_over
from tidegate_gateway.openai import endpoint_registry, error_table, http_headers, parsed_request
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.model import Call, DropReason, EngineId
from tidegate_proto.envoy import ext_proc_pb2

logger = logging.getLogger("tidegate.gateway")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PROTOCOL_BYTES = 64 * 1024
"""Of a message beside the body: headers and metadata."""
MARGIN_S = 5.0
"""Beyond the longest wait of a call, for the answer that sheds it."""
LONGEST_EXTENSION_S = 3600.0
"""Envoy takes no longer time limit."""
CUT_S = 1.0
"""For the last messages to leave when the port closes."""
ANSWERED_S = 5.0
"""For Envoy to end the stream of a request that was answered here."""
POOL_IS_KNOWN = "inference-extension"
"""The service that probes of the Gateway API Inference Extension ask for: the picker knows its InferencePool."""
HEALTH_STREAMS, HEALTH_CONNECTIONS = 16, 256
"""Of the port with the health alone."""
BODY_MODES = (ext_proc_pb2.BUFFERED, ext_proc_pb2.FULL_DUPLEX_STREAMED)
NO_BODIES = (
    "the Envoy in front of this gateway does not send whole request bodies: set request_body_mode of its ext_proc filter"
    " to BUFFERED or FULL_DUPLEX_STREAMED (docs/envoy.md)"
)
_CALLS = {kind.path: kind for kind in endpoint_registry.ENDPOINTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """The open ports, each as host:port."""

    picker: str
    health: str | None
    """None = none is wanted."""


@contextlib.asynccontextmanager
async def serving(
    gateway: running_gateway.Gateway,
    handlers: http_api.HttpApi,
    host: str,
    port: int,
    encryption: ssl.SSLContext | None = None,
) -> AsyncIterator[Addresses]:
    """The picker's port, and the one of its health if the settings want it. With `picker.selfSigned` it takes TLS and plain
    text where there is no `encryption`. Raises `OSError` when a port is taken."""
    picker, wanted = Picker(gateway, handlers), gateway.settings.picker
    health = grpc_health_check.HealthCheck(
        {
            "liveness": lambda: True,
            POOL_IS_KNOWN: lambda: gateway.discovery.knows_pool,
            **dict.fromkeys(("readiness", SERVICE, ""), picker.is_ready),
        },
        gateway.settings.limits.body_s,
        knows_all=True,
    )
    takes_plain = encryption is None and wanted.self_signed
    limits = gateway.settings.limits
    bounds = http2_server.Bounds(
        message_bytes=limits.body_bytes + PROTOCOL_BYTES,
        streams=limits.connections,
        connections=limits.connections,
        connections_per_address=limits.connections_per_address,
        handshake_s=limits.idle_s,
    )
    server = http2_server.Server(
        {f"/{SERVICE}/Process": picker.exchange, grpc_health_check.PATH: health.one},
        bounds,
        unread_answers.UnreadAnswers(limits.bodies_bytes, 3 * limits.bodies_bytes),
        gateway.bodies,
        encryption=self_signed.context("h2") if takes_plain else encryption,
        takes_plain=takes_plain,
    )
    gateway.leaving.append(server.ask_to_leave)

    async def step(look: http2_server.Look) -> bool:
        return await gateway.loops.step("picker-connections", look)

    async with contextlib.AsyncExitStack() as stack:
        listening = http2_server.listening(server, host, port, step, lambda: not picker.exchanges, CUT_S)
        address, health_address = await stack.enter_async_context(listening), None
        if wanted.health_port is not None:
            health_address = await stack.enter_async_context(_health(gateway, health, host, wanted.health_port))
        try:
            yield Addresses(picker=address, health=health_address)
        finally:
            picker.let_go()


@contextlib.asynccontextmanager
async def _health(
    gateway: running_gateway.Gateway, health: grpc_health_check.HealthCheck, host: str, port: int
) -> AsyncIterator[str]:
    """A port with the health alone, in plain text."""
    limits = gateway.settings.limits
    bounds = http2_server.Bounds(
        message_bytes=PROTOCOL_BYTES,
        streams=HEALTH_STREAMS,
        connections=HEALTH_CONNECTIONS,
        connections_per_address=HEALTH_CONNECTIONS,
        handshake_s=limits.idle_s,
        idle_s=limits.idle_s,
    )
    methods = {grpc_health_check.PATH: health.one}
    server = http2_server.Server(methods, bounds, unread_answers.UnreadAnswers(), gateway.bodies)

    async def step(look: http2_server.Look) -> bool:
        return await gateway.loops.step("picker-health-connections", look)

    async with http2_server.listening(server, host, port, step, lambda: True, CUT_S) as address:
        yield address


LONG_BYTES, MOST_ENTRIES = 8 * 1024, 4096
"""A longer message has at most so many entries: 128 headers, and the endpoints that a proxy allows."""
_NESTED = message_entries.nested(cast("descriptor.Descriptor", ext_proc_pb2.ProcessingRequest.DESCRIPTOR), maps=True)


class Picker:
    """What all exchanges share."""

    def __init__(self, gateway: running_gateway.Gateway, handlers: http_api.HttpApi) -> None:
        self.gateway = gateway
        self.requests = call_requests.CallRequests(gateway.settings.limits.choices)
        self.exchanges: set[Exchange] = set()
        self.most_exchanges = gateway.settings.limits.connections
        self.costly = costly_requests.CostlyRequests()
        self.starts = loop_steps.TenantTurns(http_listener.STARTS)
        self.endings = loop_steps.Endings()
        self.guard = handlers.guard
        self.tested = gateway.settings.picker.conformance_tests
        """The conformance suite may choose engines (`picker_conformance`)."""
        if self.tested:
            logger.warning("picker.conformanceTests is set: clients choose engines and reach all their paths")
        calls = [http_listener.Route(method="POST", path=path, handler=_carried) for path in _CALLS]
        self.routes = http_listener.Routes([*calls, *handlers.requests_but_calls()])

    def route(self, request: http_messages.Request) -> tuple[http_listener.Route, Mapping[str, str]]:
        """The route of a request, and its path arguments. Raises `BadRequest`."""
        try:
            found = self.routes.find(request.method, request.segments)
        except BadRequest:
            if not self.tested:
                raise
            return picker_conformance.ROUTE, {}
        if found[0].streams:
            raise BadRequest(f"{request.path[:80]} is served at the HTTP port of the gateway only", code="not_found")
        return found

    def exchange(self, stream: http2_stream.Stream) -> "Exchange":
        made = Exchange(self, stream)
        self.exchanges.add(made)
        if len(self.exchanges) > self.most_exchanges:
            made.turn_away()
        return made

    def is_ready(self) -> bool:
        return self.gateway.problems()[0] in ("ready", "degraded")

    def let_go(self) -> None:
        """Ends all exchanges, so that Envoy goes on with its calls alone."""
        for exchange in list(self.exchanges):
            exchange.let_go()


async def _carried(request: http_messages.Request) -> http_messages.Response:
    raise AssertionError("the exchange hands calls over")


class Exchange:
    """One HTTP request that passes through Envoy, from its headers to its end."""

    def __init__(self, picker: Picker, stream: http2_stream.Stream) -> None:
        self._picker = picker
        self._stream = stream
        self._request: http_messages.Request | None = None
        self._head_headers: ext_proc_messages.Headers = []
        """All headers as they came, before a caller was bound."""
        self._body = bytearray()
        self._bodies = picker.gateway.bodies.hold()
        self._most_body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        """Ends the stream of a request that is late, and later that of one that was answered here."""
        self._streamed_both_ways = self._answer_is_streamed = self._has_trailers = False
        self._has_body = True
        self._subset: list[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._handed_over: handed_over.HandedOver | None = None
        self._answer_headers: Mapping[str, str] = {}
        self._refused = False
        self._set_timer(picker.gateway.settings.limits.body_s, self._on_late_request)

    def turn_away(self) -> None:
        """The picker has too many exchanges."""
        self._finish(http2_stream.RESOURCE_EXHAUSTED, "the picker has as many requests as limits.connections allows")

    # The stream.

    def on_message(self, message_bytes: bytes) -> None:
        try:
            if len(message_bytes) > LONG_BYTES:
                message_entries.count(message_bytes, _NESTED, MOST_ENTRIES)
            sent = ext_proc_pb2.ProcessingRequest.FromString(message_bytes)
        except BadRequest as error:
            self._break(http2_stream.RESOURCE_EXHAUSTED, error.message)
            return
        except message.DecodeError:
            self._break(http2_stream.INVALID_ARGUMENT, f"these bytes are not a message of {SERVICE}")
            return
        if self._refused:
            return
        try:
            match sent.WhichOneof("request"):
                case "request_headers" if self._request is None:
                    self._on_headers(sent)
                case "request_headers":
                    self._break(http2_stream.INVALID_ARGUMENT, "the headers of a request come twice")
                case "request_body":
                    self._on_body(sent.request_body)
                case "request_trailers" if self._task is None:
                    self._has_trailers = True
                    self._on_whole()
                case "request_trailers":
                    self._stream.send(ext_proc_messages.TRAILERS_GO_ON)
                case "response_headers":
                    self._on_answer(sent)
                case "response_body":
                    same = ext_proc_messages.same_answer_part(sent.response_body, streamed=self._answer_is_streamed)
                    self._stream.send(same)
                case "response_trailers":
                    self._stream.send(ext_proc_messages.LAST_TRAILERS_GO_ON)
                case _:
                    self._break(http2_stream.INVALID_ARGUMENT, "a message carries nothing")
        except error_table.GatewayError as error:
            self._refuse(error)

    def on_half_close(self) -> None:
        self.on_reset()
        self._finish()

    def on_reset(self) -> None:
        """Envoy is done with the request, or its connection is lost."""
        carried = self._handed_over
        if carried is not None and carried.answered:
            self._picker.endings.end(carried.on_end)
        elif self._task is not None:
            self._picker.endings.end(self._task.cancel)
        self._over()

    def let_go(self) -> None:
        """The picker leaves: a call that still waits is shed, and Envoy goes on with all others alone."""
        if self._handed_over is None and self._request is not None:
            self._refuse(error_table.Shed(DropReason.DRAINING))
        else:
            self._finish()
        self.on_reset()

    # The request.

    def _on_headers(self, sent: ext_proc_pb2.ProcessingRequest) -> None:
        modes = sent.protocol_config
        self._streamed_both_ways = modes.request_body_mode == ext_proc_pb2.FULL_DUPLEX_STREAMED
        self._answer_is_streamed = modes.response_body_mode == ext_proc_pb2.FULL_DUPLEX_STREAMED
        self._head_headers = headers = ext_proc_messages.headers_of(sent.request_headers.headers)
        self._request = request = ext_proc_messages.request_of(headers)
        framing_errors.check_sizes(request, sum(len(name) + len(value) for name, value in headers))
        self._subset = ext_proc_messages.subset(sent)
        request.route = route, _ = self._picker.route(request)
        if request.header("content-encoding") not in ("", "identity") and not self._is_plain:
            raise BadRequest("compressed bodies are not supported; send the JSON uncompressed")
        self._picker.guard(request, route)
        self._bodies.count_for(http_headers.named_tenant(request.headers))
        self._most_body_bytes = route.body_bytes or self._picker.gateway.settings.limits.body_bytes
        if sent.request_headers.end_of_stream:
            self._has_body = False
            self._on_whole()
        elif sent.HasField("protocol_config") and modes.request_body_mode not in BODY_MODES:
            raise error_table.GatewayError("internal_error", NO_BODIES)
        elif not self._streamed_both_ways:
            self._stream.send(ext_proc_messages.GO_ON)

    def _on_late_request(self) -> None:
        if self._request is None:
            self._finish(http2_stream.DEADLINE_EXCEEDED, "the headers of the request did not arrive in time")
        else:
            self._refuse(framing_errors.slow_body(self._picker.gateway.settings.limits.body_s))

    def _on_body(self, part: ext_proc_pb2.HttpBody) -> None:
        if self._request is None or self._task is not None:
            self._break(http2_stream.INVALID_ARGUMENT, "a body comes out of turn")
            return
        data = part.body
        self._body += data
        self._bodies.add(len(data))
        if len(self._body) > self._most_body_bytes:
            raise framing_errors.body_too_large(self._most_body_bytes)
        if not self._bodies.fits:
            raise error_table.Shed(DropReason.SATURATED)
        if part.end_of_stream or not self._streamed_both_ways:
            self._on_whole()

    def _on_whole(self) -> None:
        """The whole request is here."""
        self._stop_timer()
        if self._request is None or self._task is not None:
            self._break(http2_stream.INVALID_ARGUMENT, "a request comes out of turn")
            return
        self._request.body, self._body = bytes(self._body), bytearray()
        self._task = asyncio.get_running_loop().create_task(self._serve(self._request))

    async def _serve(self, request: http_messages.Request) -> None:
        try:
            gateway = self._picker.gateway
            await self._picker.starts.next(http_headers.named_tenant(request.headers))
            if self not in self._picker.exchanges:
                return  # Envoy has given it up meanwhile
            if self._is_plain:
                await self._hand_over(gateway.clock(), picker_conformance.plain(request, gateway.directory.models))
                return
            await self._picker.costly.turn(request)
            kind, (route, arguments) = _CALLS.get(request.path), request.route or (None, {})
            if kind is not None:
                await self._hand_over(gateway.clock(), await self._picker.requests.read(kind, request))
            elif route is not None:
                response = await route.handler(request, **arguments)
                headers = {"Content-Type": response.content_type, **response.headers}
                self._answer(response.status, headers, response.body)
        except asyncio.CancelledError:
            return  # else the task would keep its error, whose frames know this object: a cycle
        except error_table.GatewayError as error:
            self._refuse(error)
        except Exception:
            logger.exception("request %s failed", request.path[:80])
            self._refuse(error_table.mistake_of_the_gateway())

    @property
    def _is_plain(self) -> bool:
        """The request passes as it came (`picker_conformance`)."""
        return self._request is not None and (self._request.route or (None,))[0] is picker_conformance.ROUTE

    async def _hand_over(self, now: float, parsed: parsed_request.ParsedRequest) -> None:
        calls = self._picker.gateway.calls
        async with calls.hand_over(now, parsed, only=self._only(), on_wait=self._on_wait) as carried:
            self._handed_over = carried
            self._answer_headers = call_requests.answer_headers(parsed.fields, carried.record, carried.call_id)
            self._send_choice(carried)
            self._let_go_of_body()
            await carried.end()

    def _only(self) -> frozenset[EngineId] | None:
        """The engines that the call may go to; None = all."""
        directory, request = self._picker.gateway.directory, self._request
        only = None if self._subset is None else directory.engines_at(self._subset)
        if self._picker.tested and request is not None:
            chosen = picker_conformance.selection(request)
            if chosen is not None:
                at_these = directory.engines_at(chosen)
                only = at_these if only is None else only & at_these
        return only

    def _on_wait(self, call: Call) -> None:
        """Asks Envoy for the time that the call may wait."""
        gateway = self._picker.gateway
        expires_at_s = gateway.core.dispatcher.expires_at_s(call.id)
        left_s = 0.0 if expires_at_s is None else expires_at_s - gateway.clock()
        self._stream.send(ext_proc_messages.more_time(min(max(left_s, 0.0) + MARGIN_S, LONGEST_EXTENSION_S)))

    def _send_choice(self, carried: handed_over.HandedOver) -> None:
        values = {ext_proc_messages.DESTINATION: carried.destination, **carried.headers}
        is_plain = self._is_plain
        remove = (picker_conformance if is_plain else ext_proc_messages).removed(self._head_headers)
        if not self._has_body:
            changed = ext_proc_messages.changes(values, remove)
            self._stream.send(ext_proc_messages.headers_choice(carried.destination, changed))
        elif self._streamed_both_ways:
            changed = ext_proc_messages.changes(values, remove)
            trailers = self._has_trailers
            for part in ext_proc_messages.streamed_choice(
                carried.destination, changed, carried.body, trailers=trailers
            ):
                self._stream.send(part)
        elif is_plain:
            changed = ext_proc_messages.changes(values, remove)
            self._stream.send(ext_proc_messages.buffered_choice(carried.destination, changed, None))
        else:
            changed = ext_proc_messages.changes({**values, "content-length": str(len(carried.body))}, remove)
            self._stream.send(ext_proc_messages.buffered_choice(carried.destination, changed, carried.body))
        carried.body = b""

    # The answer.

    def _on_answer(self, sent: ext_proc_pb2.ProcessingRequest) -> None:
        """The headers of the engine's answer, or of one that Envoy made in its place."""
        carried = self._handed_over
        values = self._answer_headers
        if carried is not None and not carried.answered:
            status = dict(ext_proc_messages.headers_of(sent.response_headers.headers)).get(":status", "")
            by = ext_proc_messages.served(sent)
            carried.on_head(int(status) if re.fullmatch("[0-9]{3}", status) else 0, by)
            if by:
                engine = carried.record.engine or ""
                values = {**values, ext_proc_messages.SERVED: by, "x-tidegate-engine": engine}
            if self._picker.tested:
                pool = self._picker.gateway.settings.inference_pool.shown
                values = {**values, **picker_conformance.told(by, carried.endpoint, pool)}
        self._stream.send(ext_proc_messages.answer_head(values))

    def _refuse(self, error: error_table.GatewayError) -> None:
        """The client gets the error, if no engine has the call. Else Envoy ends the call for a reason of ours, or goes on
        with it alone."""
        if self._handed_over is None:
            headers = {"Content-Type": "application/json", **error.headers()}
            self._answer(error.row.status, headers, error.body(), error.code)
        elif error.code in ("workflow_ended", "engine_timeout"):
            self._finish(http2_stream.ABORTED, error.message)
        else:
            self._finish()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, details: str = "answered") -> None:
        if self._request is None or self._refused:
            return
        self._refused = True
        named = {"x-request-id": http_messages.request_id(self._request), **headers}
        lower = {name.lower(): value for name, value in named.items()}
        self._stream.send(ext_proc_messages.immediate(status, lower, body, f"tidegate_{details}"))
        self._let_go_of_body()
        self._set_timer(ANSWERED_S, self._finish)

    def _finish(self, code: int = http2_stream.OK, why: str = "") -> None:
        self._refused = True
        self._stream.finish(code, why)
        self._over()

    def _break(self, code: int, why: str) -> None:
        """Ends the stream for a mistake of Envoy's, and the call that it may have carried."""
        self._finish(code, why)
        self.on_reset()

    def _let_go_of_body(self) -> None:
        self._bodies.release()
        self._body = bytearray()

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        """In place of what was timed before."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self._stop_timer()
        self._let_go_of_body()
        self._picker.exchanges.discard(self)
