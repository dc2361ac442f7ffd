"""`grpc.health.v1.Health/Check` on a port that `grpc.aio` does not serve."""

from collections.abc import Callable, Mapping

from google.protobuf import message
from grpc_health.v1 import health_pb2

from tidegate_gateway.edge import http2_stream

PATH = "/grpc.health.v1.Health/Check"


class HealthCheck:
    """The health of some services."""

    def __init__(self, services: Mapping[str, Callable[[], bool]]) -> None:
        self._services = services

    def one(self, stream: http2_stream.Stream) -> http2_stream.Handler:
        """The handler of one call."""
        return _Check(self, stream)

    def answer(self, request: bytes) -> bytes:
        """The state of the service that a request names. Raises `message.DecodeError`."""
        response = health_pb2.HealthCheckResponse
        asked = self._services.get(health_pb2.HealthCheckRequest.FromString(request).service)
        status = response.SERVICE_UNKNOWN if asked is None else response.SERVING if asked() else response.NOT_SERVING
        answer: bytes = response(status=status).SerializeToString()
        return answer


class _Check:
    def __init__(self, health: HealthCheck, stream: http2_stream.Stream) -> None:
        self._health, self._stream = health, stream

    def on_message(self, message_bytes: bytes) -> None:
        try:
            self._stream.send(self._health.answer(message_bytes))
            self._stream.finish()
        except message.DecodeError:
            self._stream.finish(http2_stream.INVALID_ARGUMENT, "these bytes are not a HealthCheckRequest")

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_reset(self) -> None:
        pass
