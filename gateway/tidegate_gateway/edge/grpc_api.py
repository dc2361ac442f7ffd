"""The same API over gRPC: Inference, Workflows, RelQueries, health and reflection.

`grpc_requests` turns messages into the values that HTTP requests become too; from there both wires take the same way.
Errors carry `ErrorInfo` (our code as its reason) and `RetryInfo`. A client that cancels a stream, or does not read
it, stops the engine.
"""

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

from google.protobuf import descriptor, descriptor_pool
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tidegate_gateway import gateway_settings, running_gateway
from tidegate_gateway.edge import (
    grpc_call,
    grpc_health_check,
    grpc_inference,
    grpc_messages,
    grpc_workflows,
    http2_server,
    relquery_grpc,
    unread_answers,
)
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

IDLE_S = 60.0
"""A connection without calls is closed after so long; clients connect again by themselves."""
STREAMS = 1000
"""Calls of one connection at a time; clients keep further ones back."""
CUT_S = 1.0
"""For the calls that are cancelled when the port closes."""
SERVICES = tuple(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values())
OPEN_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
"""They need no key."""


@contextlib.asynccontextmanager
async def serving(
    gateway: running_gateway.Gateway, host: str, port: int, encryption: ssl.SSLContext | None
) -> AsyncIterator[str]:
    """An open gRPC port, with TLS if there is an `encryption`; its address as host:port. Raises `OSError` when the port is
    taken."""
    limits = gateway.settings.limits
    calls = grpc_call.Calls(limits, gateway.authentication, gateway.bodies, waiting=gateway.settings.queue.max_requests)
    methods = _Methods()
    inference_pb2_grpc.add_InferenceServicer_to_server(grpc_inference.Inference(gateway), methods)  # type: ignore[no-untyped-call]
    workflows = grpc_workflows.Workflows(gateway.workflows, limits.write_s)
    inference_pb2_grpc.add_WorkflowsServicer_to_server(workflows, methods)  # type: ignore[no-untyped-call]
    inference_pb2_grpc.add_RelQueriesServicer_to_server(relquery_grpc.RelQueries(gateway), methods)  # type: ignore[no-untyped-call]

    def is_ready() -> bool:
        return gateway.problems()[0] in ("ready", "degraded")

    states = dict.fromkeys(("", *SERVICES), is_ready)
    watches = grpc_health_check.Health(states, limits.write_s)
    health_pb2_grpc.add_HealthServicer_to_server(watches, methods)
    shown = reflection.aio.ReflectionServicer((*SERVICES, *OPEN_SERVICES))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(shown, methods)
    server = http2_server.Server(
        {path: calls.maker(method) for path, method in methods.found.items()}
        | {grpc_health_check.PATH: grpc_health_check.HealthCheck(states, limits.body_s).one},
        _bounds(limits),
        unread_answers.UnreadAnswers(),
        gateway.bodies,
        encryption=encryption,
        takes_compressed=True,
    )
    gateway.leaving.append(server.ask_to_leave)

    async def step(look: http2_server.Look) -> bool:
        return await gateway.loops.step("grpc-connections", look)

    async with http2_server.listening(server, host, port, step, lambda: not calls.running, CUT_S) as address:
        try:
            yield address
        finally:
            for call in list(calls.running):
                call.cut()


def _bounds(limits: gateway_settings.Limits) -> http2_server.Bounds:
    return http2_server.Bounds(
        message_bytes=limits.body_bytes,
        streams=STREAMS,
        connections=limits.connections,
        connections_per_address=limits.connections_per_address,
        handshake_s=limits.idle_s,
        idle_s=IDLE_S,
    )


class _Methods:
    """Stands where gRPC's generated code expects a server, and collects the methods of services by their path."""

    def __init__(self) -> None:
        self.found: dict[str, grpc_call.Method] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The other method has them too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        described: descriptor.ServiceDescriptor = descriptor_pool.Default().FindServiceByName(service)
        for name, handler in handlers.items():
            run = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
            self.found[f"/{service}/{name}"] = grpc_call.Method(
                run=run,
                kind=grpc_messages.Kind(described.methods_by_name[name].input_type, handler.request_deserializer),
                encode=handler.response_serializer,
                takes_stream=handler.request_streaming,
                gives_stream=handler.response_streaming,
                is_open=service in OPEN_SERVICES,
            )
