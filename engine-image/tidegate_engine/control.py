"""EngineControl over gRPC: a thread beside the engine core that lets the operator switch, bound and watch the scheduler.

It translates messages and asks the `governor`; it decides nothing. Health and reflection are served with it. It runs in
the engine-core process, because that is where the queue is.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate_engine import governor
from tidegate_policy import policies, qos
from tidegate_proto.v1 import control_pb2, control_pb2_grpc

MAX_WATCHES = 16
"""Streams that may be open together; each holds a thread."""
_SPARE_THREADS = 8


class CannotListen(RuntimeError):
    """The control address is taken or cannot be bound; the message names it."""


class Control(control_pb2_grpc.EngineControlServicer):
    """The service."""

    def __init__(self, governed: governor.Governor, engine_version: str) -> None:
        self._governed = governed
        self._version = engine_version
        self._stopping = threading.Event()
        self._watches = threading.BoundedSemaphore(MAX_WATCHES)

    def stop(self) -> None:
        """Ends the open streams, each within half a second."""
        self._stopping.set()

    def SetPolicy(
        self, request: control_pb2.SetPolicyRequest, context: grpc.ServicerContext
    ) -> control_pb2.SetPolicyResponse:
        try:
            switched = self._governed.set_policy(request.policy, request.reason, dict(request.parameters))
        except (policies.UnknownPolicy, policies.BadParameter) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except governor.NotGoverned as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.SetPolicyResponse(
            policy=switched.policy, previous=switched.previous, reordered=switched.reordered
        )

    def SetControls(
        self, request: control_pb2.SetControlsRequest, context: grpc.ServicerContext
    ) -> control_pb2.SetControlsResponse:
        asked = request.controls
        try:
            controls = self._governed.set_controls(
                max_running=asked.max_running if asked.HasField("max_running") else None,
                max_step_tokens=asked.max_step_tokens if asked.HasField("max_step_tokens") else None,
            )
        except governor.NotGoverned as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.SetControlsResponse(controls=_controls(controls))

    def GetState(self, request: control_pb2.GetStateRequest, context: grpc.ServicerContext) -> control_pb2.EngineState:
        state = self._governed.state()
        return control_pb2.EngineState(
            policy=state.policy,
            policy_parameters=state.policy_parameters,
            policy_reason=state.policy_reason,
            policy_age_s=state.policy_age_s,
            controls=_controls(state.controls),
            running=state.running,
            waiting=state.waiting,
            kv_usage=state.kv_usage,
            waiting_ids=state.waiting_ids,
            engine_version=self._version,
            fallback_reason=state.fallback_reason,
            preemptions=state.preemptions,
            simulated_profile=state.simulated_profile,
        )

    def WatchQos(
        self, request: control_pb2.WatchQosRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.QosReport]:
        period_s = request.period_s or 1.0
        if not 0.1 <= period_s <= 60:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "period_s must be between 0.1 and 60")
        if not self._watches.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} callers watch already")
        gone = threading.Event()
        context.add_callback(gone.set)
        try:
            watch = self._governed.watch()
        except governor.NotGoverned as error:
            self._watches.release()
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        try:
            while not _wait(period_s, gone, self._stopping):
                yield _report(watch.cut())
        finally:
            watch.close()
            self._watches.release()


def serve(governed: governor.Governor, *, address: str, engine_version: str) -> Callable[[], None]:
    """Starts to serve on `address` and returns what stops it. Raises `CannotListen`."""
    service = Control(governed, engine_version)
    server = grpc.server(
        futures.ThreadPoolExecutor(MAX_WATCHES + _SPARE_THREADS, thread_name_prefix="tidegate-control"),
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
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(
            f"EngineControl cannot listen on {address}: the address is in use or not this host's"
        ) from error
    server.start()

    def stop() -> None:
        service.stop()
        server.stop(grace=None)

    return stop


def _wait(seconds: float, gone: threading.Event, stopping: threading.Event) -> bool:
    """Waits for the next report; True when there is nobody to send it to."""
    left_s = seconds
    while left_s > 0 and not gone.is_set() and not stopping.is_set():
        gone.wait(min(left_s, 0.5))
        left_s -= 0.5
    return gone.is_set() or stopping.is_set()


def _controls(controls: governor.Controls) -> control_pb2.Controls:
    return control_pb2.Controls(max_running=controls.max_running, max_step_tokens=controls.max_step_tokens)


def _report(report: governor.WatchReport) -> control_pb2.QosReport:
    window = report.window
    return control_pb2.QosReport(
        policy=report.policy,
        policy_parameters=report.policy_parameters,
        window_s=window.window_s,
        arrived=window.arrived,
        finished=window.finished,
        running=window.running,
        waiting=window.waiting,
        kv_usage=window.kv_usage,
        preemptions=window.preemptions,
        ttft=_histogram(window.ttft),
        tpot=_histogram(window.tpot),
        service=_histogram(window.service),
        with_target=window.with_target,
        missed=window.missed,
        blocked=window.blocked,
        busy_s=report.busy_s,
        tenants=[
            control_pb2.TenantQos(
                tenant=name, weight=tenant.weight, served_tokens=tenant.served_tokens, waiting=tenant.waiting
            )
            for name, tenant in window.tenants.items()
        ],
    )


def _histogram(histogram: qos.Histogram) -> control_pb2.Histogram:
    return control_pb2.Histogram(counts=histogram.counts, sum_s=histogram.sum_s)
