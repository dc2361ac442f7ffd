"""`grpc.health.v1.Health` of the client port and of an endpoint picker's port."""

import asyncio
from collections.abc import Callable, Mapping

from google.protobuf import message
from grpc_health.v1 import health_pb2

from tidegate_gateway.edge import grpc_answers, http2_stream

PATH = "/grpc.health.v1.Health/Check"
LOOK_S = 0.2
"""Between two looks at the states that are watched."""
States = Mapping[str, Callable[[], bool]]
"""Whether each service is there now."""


def _status(states: States, service: str) -> int:
    response = health_pb2.HealthCheckResponse
    asked = states.get(service)
    status: int = response.SERVICE_UNKNOWN if asked is None else response.SERVING if asked() else response.NOT_SERVING
    return status


class Health:
    """The health of some services, for clients. A client that does not read what it watches holds up nobody."""

    def __init__(self, states: States, write_s: float) -> None:
        self._states = states
        self._write_s = write_s
        self._watched: dict[str, int] = {}
        """The states that those who watch know."""
        self._watchers: set[asyncio.Event] = set()
        self._next_look: asyncio.TimerHandle | None = None

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc_answers.Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._states:
            context.end(http2_stream.NOT_FOUND, "there is no such service here", [])
            raise grpc_answers.Ended
        return health_pb2.HealthCheckResponse(status=_status(self._states, request.service))

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc_answers.Context
    ) -> health_pb2.HealthListResponse:
        found = {name: health_pb2.HealthCheckResponse(status=_status(self._states, name)) for name in self._states}
        return health_pb2.HealthListResponse(statuses=found)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc_answers.Context) -> None:
        changed, shown = asyncio.Event(), None
        self._watchers.add(changed)
        if self._next_look is None:
            self._look()
        try:
            while True:
                changed.clear()
                status = self._watched.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != shown:
                    answer = health_pb2.HealthCheckResponse(status=status)
                    await grpc_answers.write(context, self._write_s, answer)
                    shown = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _look(self) -> None:
        """Wakes those who watch when a state has changed, and looks again as long as somebody watches."""
        found = {name: _status(self._states, name) for name in self._states}
        if found != self._watched:
            self._watched = found
            for changed in self._watchers:
                changed.set()
        self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look) if self._watchers else None


class HealthCheck:
    """The health of some services, for a proxy."""

    def __init__(self, states: States) -> None:
        self._states = states

    def one(self, stream: http2_stream.Stream) -> http2_stream.Handler:
        """The handler of one call."""
        return _Check(self, stream)

    def answer(self, request: bytes) -> bytes:
        """The state of the service that a request names. Raises `message.DecodeError`."""
        status = _status(self._states, health_pb2.HealthCheckRequest.FromString(request).service)
        answer: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
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
