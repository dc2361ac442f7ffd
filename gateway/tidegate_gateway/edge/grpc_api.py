"""The same API over gRPC: Inference, Workflows, RelQueries, health and reflection.

`grpc_requests` turns messages into the values that HTTP requests become too; from there both wires take the same way.
Errors carry `ErrorInfo` (our code as its reason) and `RetryInfo`. A client that cancels a stream, or does not read
it, stops the engine.
"""

import asyncio
import contextlib
import logging
import socket
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
    port_encryption,
    relquery_grpc,
)
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger("tidegate.gateway")

HEALTH_S = 0.2
KEEPALIVE_S, ANSWERED_S = 30, 10
"""A silent connection gets a ping so often, and is closed when a ping is not answered for so long."""
IDLE_S = 60
"""A connection without calls is closed after so long; clients connect again by themselves."""
STOP_S, RETRY_S = 1.0, 10.0
RENEWED_S = 3600.0
"""For the calls of a server whose certificate was renewed."""
STREAMS = 1000
"""Calls of one connection at a time; clients keep further ones back."""
AHEAD_BYTES = 16 * 1024
"""Of a message that no call has asked for yet."""
UNREAD_BYTES = 4096
"""Bytes of a stream that wait here for a slow client. A token takes ten times its bytes, and gRPC's own bound is 64 KiB."""
SERVICES = tuple(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values())


@contextlib.asynccontextmanager
async def serving(
    gateway: running_gateway.Gateway, host: str, port: int, encryption: port_encryption.PortEncryption
) -> AsyncIterator[str]:
    """A started gRPC server, with TLS if that is wanted; its address as host:port. Raises `OSError` when the port is
    taken."""
    if port and encryption.wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()  # servers with TLS share a port, also with strangers
    servers = _Servers(gateway, host, encryption)
    bound = await servers.start(port)
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(_health(gateway, servers.checks)), group.create_task(servers.renew(bound, group))]
        try:
            yield listen_address.shown(host, bound)
        finally:
            for task in watching:
                task.cancel()
            await servers.stop()


class _Servers:
    """The server of a port, and the servers before it whose calls go on. A new certificate needs a new server: gRPC's
    credentials that change end the process when a client ends its handshake early (grpcio 1.85)."""

    def __init__(self, gateway: running_gateway.Gateway, host: str, encryption: port_encryption.PortEncryption) -> None:
        self._host = host
        self._encryption = encryption
        self._limits = gateway.settings.limits
        open_services = (health.SERVICE_NAME, reflection.SERVICE_NAME)
        authentication = grpc_authentication.Authentication(gateway.authentication, without_key=open_services)
        self._interceptors = [
            *([authentication] if gateway.authentication.required else []),
            grpc_messages.Messages(self._limits.bodies_bytes),
        ]
        self._inference = grpc_inference.Inference(gateway)
        self._workflows = grpc_workflows.Workflows(gateway.workflows, self._limits.write_s)
        self._relqueries = relquery_grpc.RelQueries(gateway)
        self.checks = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        """The newest is the last."""
        self._version = encryption.version

    async def start(self, port: int) -> int:
        """Starts a server with the newest certificate; its port. Raises `OSError` when the port is taken."""
        server = grpc.aio.server(
            interceptors=self._interceptors,
            maximum_concurrent_rpcs=self._limits.connections,
            options=[
                ("grpc.max_receive_message_length", self._limits.body_bytes),
                ("grpc.max_concurrent_streams", STREAMS),
                ("grpc.http2.lookahead_bytes", AHEAD_BYTES),
                ("grpc.so_reuseport", int(self._encryption.wanted)),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
                ("grpc.keepalive_timeout_ms", ANSWERED_S * 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.write_buffer_size", UNREAD_BYTES),
                ("grpc.max_allowed_incoming_connections", self._limits.connections),
                ("grpc.server_handshake_timeout_ms", round(self._limits.idle_s * 1000)),
                ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            ],
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, server)  # type: ignore[no-untyped-call]
        inference_pb2_grpc.add_WorkflowsServicer_to_server(self._workflows, server)  # type: ignore[no-untyped-call]
        inference_pb2_grpc.add_RelQueriesServicer_to_server(self._relqueries, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.checks, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        version = self._encryption.version
        where, credentials = listen_address.shown(self._host, port), self._encryption.grpc_credentials()
        try:
            bound: int = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}: {error}") from error
        await server.start()
        self._servers.append(server)
        self._version = version
        return bound

    async def renew(self, port: int, group: asyncio.TaskGroup) -> None:
        """Starts another server whenever there is another certificate, until cancelled."""
        while self._encryption.wanted:
            await asyncio.sleep(HEALTH_S)
            if self._encryption.version == self._version:
                continue
            before = list(self._servers)
            try:
                await self.start(port)
            except OSError as error:
                logger.error("the gRPC port keeps the certificate that it has for now: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            for server in before:
                group.create_task(self._end(server, RENEWED_S))

    async def stop(self) -> None:
        await asyncio.gather(*[self._end(server, STOP_S) for server in self._servers])

    async def _end(self, server: grpc.aio.Server, within_s: float) -> None:
        await server.stop(within_s)
        if server in self._servers:
            self._servers.remove(server)


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
