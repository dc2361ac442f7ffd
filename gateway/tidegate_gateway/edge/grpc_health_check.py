"""`grpc.health.v1.Health` of the client port and of an endpoint picker's port.

A check needs no key, so it must cost little: it is answered at once, and nothing of it stays. A task for each of the
thousands of checks that a client may send at a time would keep other calls waiting.
"""

import asyncio
import zlib
from collections.abc import Callable, Mapping

from google.protobuf import message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate_gateway.edge import grpc_answers, grpc_messages, http2_stream

PATH = "/grpc.health.v1.Health/Check"
LONGEST_BYTES = 1024
"""Of a request: it has the name of a service."""
LOOK_S = 0.2
"""Between two looks at the states that are watched."""
States = Mapping[str, Callable[[], bool]]
"""Whether each service is there now."""


def _status(states: States, service: str) -> int:
    response = health_pb2.HealthCheckResponse
    asked = states.get(service)
    status: int = response.SERVICE_UNKNOWN if asked is None else response.SERVING if asked() else response.NOT_SERVING
    return status


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The lists and watches of the health of some services. A client that does not read what it watches holds up nobody."""

    def __init__(self, states: States, write_s: float) -> None:
        self._states = states
        self._write_s = write_s
        self._watched: dict[str, int] = {}
        """The states that those who watch know."""
        self._watchers: set[asyncio.Event] = set()
        self._next_look: asyncio.TimerHandle | None = None

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
    """The checks of the health of some services."""

    def __init__(self, states: States, body_s: float, *, knows_all: bool = False) -> None:
        """A request must arrive within `body_s` seconds. A service that is not among the `states` is an error, or, with
        `knows_all`, one whose state is not known, as pickers of the Gateway API answer."""
        self._states = states
        self.body_s = body_s
        self._knows_all = knows_all

    def one(self, stream: http2_stream.Stream) -> http2_stream.Handler:
        """The handler of one call."""
        return _Check(self, stream)

    def answer(self, request: bytes) -> bytes | None:
        """The state of the service that a request names; None = there is no such service. Raises `message.DecodeError`."""
        service = health_pb2.HealthCheckRequest.FromString(request).service
        if service not in self._states and not self._knows_all:
            return None
        answer: bytes = health_pb2.HealthCheckResponse(status=_status(self._states, service)).SerializeToString()
        return answer


class _Check:
    def __init__(self, health: HealthCheck, stream: http2_stream.Stream) -> None:
        self._health, self._stream = health, stream
        self._late = asyncio.get_running_loop().call_later(health.body_s, self._is_late)

    def on_message(self, message_bytes: bytes) -> None:
        self._late.cancel()
        try:
            answer = self._health.answer(self._inflated(message_bytes))
        except (message.DecodeError, zlib.error, KeyError):
            self._stream.finish(http2_stream.INVALID_ARGUMENT, "these bytes are not a HealthCheckRequest")
            return
        if answer is None:
            self._stream.finish(http2_stream.NOT_FOUND, "there is no such service here")
            return
        self._stream.send(answer)
        self._stream.finish()

    def _inflated(self, message_bytes: bytes) -> bytes:
        if not self._stream.is_compressed:
            return message_bytes
        window_bits = grpc_messages.WINDOW_BITS[self._stream.head.value("grpc-encoding")]
        return zlib.decompressobj(window_bits).decompress(message_bytes, LONGEST_BYTES)

    def on_half_close(self) -> None:
        self._late.cancel()
        self._stream.finish(http2_stream.INVALID_ARGUMENT, "the call ended before its message had come")

    def on_reset(self) -> None:
        self._late.cancel()

    def _is_late(self) -> None:
        within = f"the message did not arrive within {self._health.body_s:.3g} s"
        self._stream.finish(http2_stream.INVALID_ARGUMENT, within)
