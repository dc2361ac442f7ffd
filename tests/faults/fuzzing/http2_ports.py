"""The ports of HTTP/2 in memory: the gRPC API and the endpoint picker, and the frames that a peer sends them."""

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any

import hpack
from fuzzing import memory_gateway
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tidegate_gateway.edge import (
    ext_proc,
    grpc_api,
    grpc_call,
    grpc_health_check,
    grpc_inference,
    grpc_workflows,
    http2_frames,
    http2_server,
    relquery_grpc,
    unread_answers,
)
from tidegate_proto.v1 import inference_pb2_grpc

STATUS = re.compile(rb"\x00\x0bgrpc-status[\x01\x02](\d{1,2})")
"""The status of a stream, as the gateway writes it."""
FAILURES = (b"2", b"13")
"""UNKNOWN and INTERNAL."""
UNDECLARED = b"a message is compressed by gzip, deflate or not at all"
"""gRPC's protocol wants INTERNAL for a message that is compressed in a call whose head does not say how."""
THREAD_MS = 50
"""For a thread to decode a compressed message."""
_GATEWAY = memory_gateway.GATEWAY


def grpc_methods() -> dict[str, grpc_call.Method]:
    """The methods of the gRPC port, by their path."""
    methods, limits = grpc_api._Methods(), _GATEWAY.settings.limits
    workflows = grpc_workflows.Workflows(_GATEWAY.workflows, limits.write_s)
    checks = grpc_health_check.Health({"": lambda: True}, limits.write_s)
    shown = reflection.aio.ReflectionServicer(grpc_api.SERVICES)
    inference_pb2_grpc.add_InferenceServicer_to_server(grpc_inference.Inference(_GATEWAY), methods)
    inference_pb2_grpc.add_WorkflowsServicer_to_server(workflows, methods)
    inference_pb2_grpc.add_RelQueriesServicer_to_server(relquery_grpc.RelQueries(_GATEWAY), methods)
    health_pb2_grpc.add_HealthServicer_to_server(checks, methods)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(shown, methods)
    return methods.found


def _server(methods: dict[str, Callable[[Any], Any]], *, takes_compressed: bool) -> http2_server.Server:
    bounds = grpc_api._bounds(_GATEWAY.settings.limits)
    unread = unread_answers.UnreadAnswers()
    return http2_server.Server(methods, bounds, unread, _GATEWAY.bodies, takes_compressed=takes_compressed)


CALLS = grpc_call.Calls(_GATEWAY.settings.limits, _GATEWAY.authentication, _GATEWAY.bodies, waiting=100)
"""The calls of the gRPC port."""


def grpc_server() -> http2_server.Server:
    check = grpc_health_check.HealthCheck({"": lambda: True}, _GATEWAY.settings.limits.body_s)
    methods = {path: CALLS.maker(method) for path, method in grpc_methods().items()}
    methods[grpc_health_check.PATH] = check.one
    return _server(methods, takes_compressed=True)


def picker_server() -> tuple[ext_proc.Picker, http2_server.Server]:
    picker = ext_proc.Picker(_GATEWAY, memory_gateway.HANDLERS)
    return picker, _server({f"/{ext_proc.SERVICE}/Process": picker.exchange}, takes_compressed=False)


def head(path: str, *further: tuple[str, str]) -> bytes:
    """The compressed head of a call, which depends on no other head."""
    pairs = [(":method", "POST"), (":path", path), ("content-type", "application/grpc"), *further]
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in pairs], huffman=False)


def opened(path: str, *further: tuple[str, str]) -> bytes:
    """The first frame of a call, which is the first of its connection."""
    return http2_frames.frame(http2_frames.HEADERS, http2_frames.END_HEADERS, 1, head(path, *further))


def data(message: bytes, *, compressed: bool = False, ends: bool = False) -> bytes:
    """A message of the first call, in frames."""
    framed, most = bytes([compressed]) + len(message).to_bytes(4) + message, http2_frames.MOST_FRAME_BYTES
    parts = [framed[at : at + most] for at in range(0, len(framed), most)]
    last = len(parts) - 1
    return b"".join(
        http2_frames.frame(http2_frames.DATA, http2_frames.END_STREAM * (ends and at == last), 1, part)
        for at, part in enumerate(parts)
    )


async def converse(
    server: http2_server.Server,
    sent: Iterable[bytes],
    is_over: Callable[[], bool],
    *,
    turns: int = 1,
    waits: bool = False,
) -> None:
    """Sends the bytes on one connection, with so many turns of the event loop after each piece. With `waits` a thread has
    time to decode a message before the connection ends. Raises `Finding`."""
    transport, connection = memory_gateway.Transport(), server()
    connection.connection_made(transport)
    for piece in sent:
        if not await transport.takes_more():
            break
        connection.data_received(piece)
        for _ in range(turns):
            await asyncio.sleep(0)
    await memory_gateway.quiet()
    for _ in range(THREAD_MS if waits else 0):
        if is_over():
            break
        await asyncio.sleep(0.001)
    connection.connection_lost(None)
    await memory_gateway.settled(is_over)
    for status in STATUS.finditer(transport.written):
        if status[1] in FAILURES and UNDECLARED not in transport.written[status.end() : status.end() + 100]:
            raise memory_gateway.Finding(f"a call ended with the status {status[1].decode()}")
    if server.connections:
        raise memory_gateway.Finding("a connection that is lost still counts")
