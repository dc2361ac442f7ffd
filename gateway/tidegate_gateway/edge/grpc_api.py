"""The same API over gRPC: Inference, Workflows, RelQueries, health and reflection.

`grpc_requests` turns messages into the values that HTTP requests become too; from there both wires take the same way.
Errors carry `ErrorInfo` (our code as its reason) and `RetryInfo`. A client that cancels a stream, or does not read
it, stops the engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate_gateway import running_gateway
from tidegate_gateway.edge import (
    grpc_authentication,
    grpc_inference,
    grpc_messages,
    grpc_workflows,
    listen_address,
    relquery_grpc,
)
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

HEALTH_S = 0.2
KEEPALIVE_S, ANSWERED_S = 30, 10
"""A silent connection gets a ping so often, and is closed when a ping is not answered for so long."""
IDLE_S = 60
"""A connection without calls is closed after so long; clients connect again by themselves."""
STOP_S = 1.0
STREAMS = 1000
"""Calls of one connection at a time; clients keep further ones back."""
AHEAD_BYTES = 16 * 1024
"""Of a message that no call has asked for yet."""
UNREAD_BYTES = 4096
"""Bytes of a stream that wait here for a slow client. A token takes ten times its bytes, and gRPC's own bound is 64 KiB."""
SERVICES = tuple(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values())


@contextlib.asynccontextmanager
async def serving(
    gateway: running_gateway.Gateway, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """A started gRPC server, with TLS if it has `credentials`; its address as host:port. Raises `OSError` when
    the port is taken."""
    limits = gateway.settings.limits
    open_services = (health.SERVICE_NAME, reflection.SERVICE_NAME)
    authentication = grpc_authentication.Authentication(gateway.authentication, without_key=open_services)
    server = grpc.aio.server(
        interceptors=[
            *([authentication] if gateway.authentication.required else []),
            grpc_messages.Messages(limits.bodies_bytes),
        ],
        maximum_concurrent_rpcs=limits.connections,
        options=[
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.max_concurrent_streams", STREAMS),
            ("grpc.http2.lookahead_bytes", AHEAD_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", ANSWERED_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.write_buffer_size", UNREAD_BYTES),
            ("grpc.max_allowed_incoming_connections", limits.connections),
            ("grpc.server_handshake_timeout_ms", round(limits.idle_s * 1000)),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        ],
    )
    inference = grpc_inference.Inference(gateway)
    workflows = grpc_workflows.Workflows(gateway.workflows, limits.write_s)
    relqueries = relquery_grpc.RelQueries(gateway)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
    inference_pb2_grpc.add_WorkflowsServicer_to_server(workflows, server)  # type: ignore[no-untyped-call]
    inference_pb2_grpc.add_RelQueriesServicer_to_server(relqueries, server)  # type: ignore[no-untyped-call]
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    where = listen_address.shown(host, port)
    try:
        bound = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {where}: {error}") from error
    await server.start()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_health(gateway, checks))
        try:
            yield listen_address.shown(host, bound)
        finally:
            watching.cancel()
            await server.stop(STOP_S)


async def _health(gateway: running_gateway.Gateway, checks: Any) -> None:
    """Keeps the health service in step with /ready."""
    shown: int | None = None
    while True:
        ready = gateway.problems()[0] in ("ready", "degraded")
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        if status != shown:
            for service in ("", *SERVICES):
                await checks.set(service, status)
            shown = status
        await asyncio.sleep(HEALTH_S)
