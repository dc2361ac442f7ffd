"""A gateway without sockets: ports, one engine and an event loop in memory, and what no input may ever cause in them."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import orjson

from tidegate_gateway import gateway_settings, http_client, reading_turns, running_gateway
from tidegate_gateway.edge import http_api, http_connection
from tidegate_gateway.engines import health_check
from tidegate_gateway.store import relquery_store
from tidegate_policy.cost import CostModel
from tidegate_policy.model import EngineId

LOOP = asyncio.new_event_loop()
QUIET_TURNS = 25
"""Turns of the event loop after the last input, in which a request is answered."""
SETTLE_S = 20.0
"""Everything of a connection must be over so long after its end; threads may have to wait for a busy machine."""
MODEL = "fake"

http_connection.LINGER_S = 0.0


class Finding(Exception):
    """The gateway did what it must never do."""


class Transport(asyncio.Transport):
    """Keeps what is written, and answers for a socket. `on_write` takes what is written."""

    def __init__(self, on_write: Callable[[bytes], None] = lambda data: None) -> None:
        super().__init__()
        self.written = bytearray()
        self.paused = self.closed = False
        self._on_write = on_write

    def write(self, data: Any) -> None:
        self.written += data
        self._on_write(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def setsockopt(self, *_: Any) -> None:
        pass

    def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    async def takes_more(self) -> bool:
        """Waits until the connection reads on; whether it does."""
        for _ in range(QUIET_TURNS):
            if self.closed or not self.paused:
                break
            await asyncio.sleep(0)
        return not self.closed and not self.paused


class _ErrorLog(logging.Handler):
    """Keeps the errors of the log: the gateway logs each exception that it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self._format = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self._format.format(record))


_errors = _ErrorLog()
logging.getLogger().handlers = [_errors]
logging.getLogger("tidegate").propagate = True
LOOP.set_exception_handler(
    lambda loop, context: _errors.found.append(f"{context['message']}: {context.get('exception')!r}")
)


class _Store:
    """Stands for a store in the settings of relQueries; the link says that none answers."""

    gateway = "fuzzed"


_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "input_tokens": 1, "output_tokens": 1}
_ANSWER = {
    "object": "response",
    "output": [],
    "data": [{"embedding": [0.5]}],
    "choices": [{"index": 0, "text": "a", "message": {"content": "a"}, "finish_reason": "stop"}],
    "usage": _USAGE,
}
_EVENTS = (
    b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
    b'event: response.completed\ndata: {"response":{"output":[]}}\n\n',
    b'data: {"choices":[{"index":0,"text":"a","delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n',
)


class _Engine:
    """The connections to an engine that answers each call well."""

    async def get(self, origin: str) -> http_client.Connection:
        arrived = memoryview(bytearray(http_client.READ_BYTES))
        made = http_client.Connection(lambda connection: None, reading_turns.ReadingTurns(), arrived, 1)

        def answer(request: bytes) -> None:
            head, _, body = request.partition(b"\r\n\r\n")
            kind, content = b"application/json", orjson.dumps(_ANSWER)
            if orjson.loads(body).get("stream"):
                kind, content = b"text/event-stream", _EVENTS[b"/v1/responses" not in head.partition(b"\r\n")[0]]
            framed = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (
                kind,
                len(content),
                content,
            )
            arrived[: len(framed)] = framed
            made.buffer_updated(len(framed))

        made.connection_made(Transport(lambda request: asyncio.get_running_loop().call_soon(answer, request) and None))
        return made


def _gateway() -> running_gateway.Gateway:
    settings = gateway_settings.from_mapping({"listen": {"port": 0}, "engines": [{"url": "http://127.0.0.1:9"}]})
    relqueries = relquery_store.RelQueryStore(_Store(), settings.store, settings.relqueries)  # type: ignore[arg-type]
    made = running_gateway.Gateway(settings, _Engine(), None, relqueries, profiles=lambda name: {})  # type: ignore[arg-type]
    engine = health_check.EngineHealth(
        address=health_check.Address(
            id=EngineId("127.0.0.1:9"),
            url="http://127.0.0.1:9",
            control=None,
            node_pool="",
            cost=CostModel(step_s=0.01, prefill_s=0.0001),
        ),
        reason=None,
        models=(MODEL,),
    )
    made.discovery.known[engine.address.id] = engine
    made.directory.on_report(engine.report())
    return made


async def _made() -> tuple[running_gateway.Gateway, http_api.HttpApi]:
    gateway = _gateway()
    return gateway, http_api.HttpApi(gateway)


GATEWAY, HANDLERS = LOOP.run_until_complete(_made())


def pieces(data: bytes) -> Iterator[bytes]:
    """The bytes of an input in the pieces in which they arrive; its first byte says how small they are."""
    mode, data = data[:1], data[1:]
    if not mode or not mode[0]:
        yield data
        return
    chosen, at = random.Random(mode[0]), 0
    while at < len(data):
        size = chosen.randint(1, 1 << chosen.randint(0, 9))
        yield data[at : at + size]
        at += size


class Peer:
    """The connection to a server that sends the bytes of an input."""

    def __init__(self) -> None:
        self.arrived = memoryview(bytearray(http_client.READ_BYTES))
        self.made = http_client.Connection(lambda connection: None, reading_turns.ReadingTurns(), self.arrived, 1)
        self.transport = Transport()
        self.made.connection_made(self.transport)

    async def get(self, origin: str) -> http_client.Connection:
        return self.made

    async def feed(self, data: bytes) -> None:
        """The server sends these bytes and closes its connection."""
        for piece in pieces(data):
            if not await self.transport.takes_more():
                break
            self.arrived[: len(piece)] = piece
            self.made.buffer_updated(len(piece))
            await asyncio.sleep(0)
        if not self.transport.closed:
            self.made.eof_received()
        self.made.connection_lost(None)


def answer(content: bytes, kind: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer that ends with its connection."""
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\n\r\n%s" % (status, kind, content)


def chunked(content: bytes, kind: bytes) -> bytes:
    """An answer in one chunk, with a trailer."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
    return head + b"%x\r\n%s\r\n0\r\nX-Trailer: a\r\n\r\n" % (len(content), content)


async def settled(is_over: Callable[[], bool]) -> None:
    """Waits until it is over, and no body and no call counts any more. Raises `Finding` if that never happens."""
    until_s = time.monotonic() + SETTLE_S
    turns = 0
    while not is_over() or GATEWAY.bodies.used or GATEWAY.placements.in_progress:
        turns += 1
        await asyncio.sleep(0 if turns < 4 * QUIET_TURNS else 0.002)  # later it waits for a thread
        if time.monotonic() > until_s:
            counted = f"{GATEWAY.bodies.used} bytes and {GATEWAY.placements.in_progress} calls count"
            raise Finding(f"what belongs to a connection goes on after its end; {counted}")


async def quiet() -> None:
    """Lets the gateway answer what it has."""
    for _ in range(QUIET_TURNS):
        await asyncio.sleep(0)


def run(made: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
    """Runs what one input causes. Raises `Finding` if the log has an unexpected exception."""
    _errors.found.clear()
    try:
        LOOP.run_until_complete(made)
    except Finding as finding:
        raise Finding("\n".join([str(finding), *_errors.found])) from None
    if _errors.found:
        raise Finding(_errors.found[0])
