"""EngineControl's server: a gRPC thread beside the engine core that switches, bounds and watches the scheduler.

The server translates messages and asks a `control_contract.ControlledEngine`; it decides nothing. It serves health and
reflection too. With a token, every call except those of health must carry it. The server runs in the engine-core process,
because the queue is in that process.
"""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate_control import control_contract, pool_token, translation
from tidegate_policy import policies
from tidegate_policy.engine import engine_status
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

MAX_WATCHES = 16
"""Streams that may be open at the same time; each stream occupies a thread."""
_SPARE_THREADS = 8


class CannotListen(RuntimeError):
    """The control address is in use or cannot be bound; the message names the address and the cause."""


class Serving(NamedTuple):
    """A server that runs."""

    address: str
    """Its address, with the port that it has."""
    stop: Callable[[], None]


class Control(control_pb2_grpc.EngineControlServicer):
    """The servicer of one engine."""

    def __init__(self, engine: control_contract.ControlledEngine, engine_version: str) -> None:
        self._engine = engine
        self._version = engine_version
        self._stopping = threading.Event()
        self._watches = threading.BoundedSemaphore(MAX_WATCHES)

    def stop(self) -> None:
        """Ends every open stream within half a second."""
        self._stopping.set()

    def SetPolicy(
        self, request: control_pb2.SetPolicyRequest, context: grpc.ServicerContext
    ) -> control_pb2.SetPolicyResponse:
        try:
            switched = self._engine.set_policy(
                request.policy, request.reason, dict(request.parameters), bypass=request.bypass
            )
        except (policies.UnknownPolicy, policies.BadParameter) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except control_contract.NotControllable as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.SetPolicyResponse(
            policy=switched.policy, previous=switched.previous, reordered=switched.reordered
        )

    def SetControls(
        self, request: control_pb2.SetControlsRequest, context: grpc.ServicerContext
    ) -> control_pb2.SetControlsResponse:
        asked = request.controls
        try:
            controls = self._engine.set_controls(
                max_running=asked.max_running if asked.HasField("max_running") else None,
                max_step_tokens=asked.max_step_tokens if asked.HasField("max_step_tokens") else None,
            )
        except control_contract.NotControllable as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.SetControlsResponse(controls=translation.to_controls(controls))

    def GetState(self, request: control_pb2.GetStateRequest, context: grpc.ServicerContext) -> control_pb2.EngineState:
        listed = request.max_waiting_ids if request.HasField("max_waiting_ids") else engine_status.SHOWN_WAITING
        state = self._engine.state(max_waiting_ids=min(listed, engine_status.SHOWN_WAITING))
        return translation.to_state(state, engine_version=self._version)

    def WatchQos(
        self, request: control_pb2.WatchQosRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.QosReport]:
        period_s = request.period_s or 1.0
        if not 0.1 <= period_s <= 60:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "period_s must be between 0.1 and 60")
        if not 0 <= request.idle_period_s <= 60:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "idle_period_s must be between 0 and 60")
        gone = threading.Event()
        if not context.add_callback(gone.set):
            return  # the caller has left already, so nobody would end the stream
        if not self._watches.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} callers already watch this engine")
        with contextlib.ExitStack() as held:
            held.callback(self._watches.release)
            try:
                watch = self._engine.watch()
            except control_contract.NotControllable as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            held.callback(watch.close)
            unsent = _Unsent(request.idle_period_s - period_s / 2)
            while not _wait(period_s, gone, self._stopping):
                if (report := unsent.due(watch.cut())) is not None:
                    yield translation.to_report(report)


class _Unsent:
    """Which windows does a stream send? Idle windows that follow a report of an idle window become one."""

    def __init__(self, longest_s: float) -> None:
        """A window of `longest_s` is sent in any case."""
        self._longest_s = longest_s
        self._sent: engine_status.WatchReport | None = None
        self._idle_s = 0.0
        """The windows that were not sent."""

    def due(self, report: engine_status.WatchReport) -> engine_status.WatchReport | None:
        """The report to send now that this window has ended, with the windows before it that were not sent."""
        window_s = self._idle_s + report.window.window_s
        if window_s < self._longest_s and self._says_nothing(report):
            self._idle_s = window_s
            return None
        self._sent, self._idle_s = report, 0.0
        return dataclasses.replace(report, window=dataclasses.replace(report.window, window_s=window_s))

    def _says_nothing(self, report: engine_status.WatchReport) -> bool:
        sent = self._sent
        if sent is None or not (sent.window.is_idle and report.window.is_idle):
            return False
        return dataclasses.replace(report, window=sent.window) == sent


class _TokenCheck(grpc.ServerInterceptor):
    """Rejects calls that do not carry the token of the pool, before their message is read."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return continuation(details)
        problem = pool_token.problem(self._token, details.invocation_metadata)
        return continuation(details) if problem is None else grpc.unary_unary_rpc_method_handler(_rejecting(problem))


def _rejecting(problem: str) -> Callable[[bytes, grpc.ServicerContext], None]:
    def reject(request: bytes, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)

    return reject


def serve(
    engine: control_contract.ControlledEngine, *, address: str, engine_version: str, token: str | None = None
) -> Serving:
    """Starts to serve on `address`: HOST:PORT, where port 0 picks a free one, or a Unix socket (`unix:PATH`). Calls must
    carry `token`, unless it is None. Raises `CannotListen`."""
    if problem := _problem(address):
        raise CannotListen(f"EngineControl cannot listen on {address!r}: {problem}")
    service = Control(engine, engine_version)
    server = grpc.server(
        futures.ThreadPoolExecutor(MAX_WATCHES + _SPARE_THREADS, thread_name_prefix="tidegate-control"),
        interceptors=[] if token is None else [_TokenCheck(token)],
        options=(("grpc.so_reuseport", 0),),  # a second engine on this address must fail, not share it
    )
    control_pb2_grpc.add_EngineControlServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_service = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    name = control_pb2.DESCRIPTOR.services_by_name["EngineControl"].full_name
    for checked in ("", name):
        health_service.set(checked, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(f"EngineControl cannot listen on {address!r}: gRPC says: {error}") from error
    server.start()

    def stop() -> None:
        service.stop()
        server.stop(grace=None)

    return Serving(address if _is_path(address) else f"{address.rpartition(':')[0]}:{port}", stop)


def _is_path(address: str) -> bool:
    return address.startswith("unix:")


def _problem(address: str) -> str | None:
    """Why no server can listen on the address, as far as a look before shows it. gRPC takes a port beyond 65,535 for
    another port, and writes its own lines about other problems."""
    if _is_path(address):
        return None
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and int(port) <= 65_535):
        return "the address must be HOST:PORT with a port from 0 to 65535"
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return f"the host has no address ({error.strerror})"
    problems = [problem for family, _, _, _, where in found if (problem := _cannot_bind(family, where))]
    return problems[0] if len(problems) == len(found) else None


def _cannot_bind(family: socket.AddressFamily, where: tuple[Any, ...]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return str(error.strerror)
    return None


def _wait(seconds: float, gone: threading.Event, stopping: threading.Event) -> bool:
    """Waits until the next report is due; True when the stream has ended or the server stops."""
    left_s = seconds
    while left_s > 0 and not gone.is_set() and not stopping.is_set():
        gone.wait(min(left_s, 0.5))
        left_s -= 0.5
    return gone.is_set() or stopping.is_set()
