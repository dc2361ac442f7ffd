"""One call of a gRPC client: who calls, its one message, its deadline, and what its method sends."""

import asyncio
import contextlib
import functools
import logging
import re
import traceback
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import message

from tidegate_gateway import gateway_settings, loop_steps, tenant_budget
from tidegate_gateway.callers import authentication, caller
from tidegate_gateway.edge import grpc_answers, grpc_messages, http2_heads, http2_stream
from tidegate_gateway.openai import error_table, http_headers
from tidegate_gateway.openai.error_table import BadRequest
from tidegate_policy.model import DropReason

logger = logging.getLogger("tidegate.gateway")

_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
STARTS = 8
"""Calls that start in one turn of the event loop, so that many calls at a time do not make a turn long."""
WAITING, WAITING_BYTES = 1000, 100
"""Messages of a stream that its method has not taken yet; the memory that each takes beside its bytes."""
OPEN_PART = 10
"""Streams of the services that need no key may be one of so many of the calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of a service."""

    run: Callable[[Any, grpc_answers.Context], Any]
    """Takes the message, or all messages; gives an answer, or writes some, or yields some."""
    kind: grpc_messages.Kind
    encode: Callable[[Any], bytes]
    takes_stream: bool
    gives_stream: bool
    is_open: bool
    """It needs no key."""


class Calls:
    """What all calls of a port share."""

    def __init__(
        self,
        limits: gateway_settings.Limits,
        callers: authentication.Authentication,
        bodies: tenant_budget.TenantBudget,
        *,
        waiting: int,
    ) -> None:
        """`bodies` counts the bytes of the messages. Besides `limits.connections` calls, `waiting` may be here, which need
        no open file."""
        self.limits = limits
        self.callers = callers
        self.messages = grpc_messages.Messages(bodies, limits.body_bytes)
        self.costly = loop_steps.TenantTurns()
        self.starts = loop_steps.TenantTurns(STARTS)
        self.endings = loop_steps.Endings()
        self.budget = tenant_budget.TenantBudget(limits.connections + waiting)
        self.open_budget = tenant_budget.TenantBudget(max(limits.connections // OPEN_PART, 10))
        self.running: set[Call] = set()

    def maker(self, method: Method) -> Callable[[http2_stream.Stream], "Call"]:
        """Makes the handler of a method's stream."""
        return lambda stream: Call(self, stream, method)


class Call:
    """The handler of one stream, and the context of its method."""

    def __init__(self, calls: Calls, stream: http2_stream.Stream, method: Method) -> None:
        self._calls = calls
        self._stream = stream
        self._method = method
        self._caller: caller.Caller | None = None
        self._metadata: list[tuple[str, str]] = []
        self._messages: asyncio.Queue[tuple[bytes, str] | None] | None = None
        self._first = b"", ""
        """Its message, until its method runs, and how it is compressed."""
        self._turn: asyncio.Future[None] | None = None
        """Its place in the line of calls that start, while it waits there."""
        self._task: asyncio.Task[None] | None = None
        self._began = False
        """Its message has come."""
        self._timers: list[asyncio.TimerHandle] = []
        self._held = (calls.open_budget if method.is_open else calls.budget).hold()
        self._queued = calls.messages.hold("")
        self._is_costly = False
        try:
            self._begin()
        except error_table.GatewayError as error:
            grpc_answers.refuse(self, error)

    def _begin(self) -> None:
        """Knows the caller before any message is read. Raises `GatewayError`."""
        self._metadata = given = list(self._stream.head.headers)
        if self._calls.callers.required and not self._method.is_open:
            try:
                self._caller = self._calls.callers.caller_of(given)
            except error_table.GatewayError as error:
                self._stream.is_unknown = error.code == "invalid_api_key"
                raise
            self._metadata = self._caller.bound(given)
        open_to_all = self._calls.callers.required and self._caller is None
        self._tenant = "" if open_to_all else http_headers.named_tenant(self._metadata)
        for held in (self._stream.counted, self._held, self._queued):
            held.count_for(self._tenant)
        self._held.add(1)
        grpc_messages.check(self._held)
        self._calls.running.add(self)
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self._calls.limits.body_s, self._late))
        if (left_s := _left_s(self._stream.head)) is not None:
            self._timers.append(loop.call_later(left_s, self._deadline))

    # The handler.

    def on_message(self, message_bytes: bytes) -> None:
        compression = self._stream.head.value("grpc-encoding") if self._stream.is_compressed else ""
        if self._stream.is_compressed and compression not in grpc_messages.WINDOW_BITS:
            code = http2_stream.UNIMPLEMENTED if compression not in ("", "identity") else http2_stream.INTERNAL
            self.end(code, "a message is compressed by gzip, deflate or not at all", [])
            self.on_reset()
            return
        if not self._began:
            self._began = True
            self._timers.pop(0).cancel()
            if not self._has_room(message_bytes):
                return
            if self._method.takes_stream:
                self._messages = asyncio.Queue()
                self._messages.put_nowait((message_bytes, compression))
            else:
                self._first = message_bytes, compression
            self._line_up()
        elif self._messages is None or self._messages.qsize() >= WAITING:
            grpc_answers.refuse(self, BadRequest("the call has too many messages"))
            self.on_reset()
        elif self._has_room(message_bytes):
            self._messages.put_nowait((message_bytes, compression))

    def _has_room(self, message_bytes: bytes) -> bool:
        """Whether the message may wait. If too much waits, the call is refused."""
        self._queued.add(len(message_bytes) + WAITING_BYTES)
        if not self._queued.fits:
            grpc_answers.refuse(self, error_table.Shed(DropReason.SATURATED))
            self.on_reset()
            return False
        return True

    def _line_up(self) -> None:
        """The call starts when it is the turn of its tenant. It has no task before, so a client that opens calls and resets
        them costs little. A tenant that the message alone names is not known yet: its call takes its turn later."""
        if not self._tenant:
            self._start()
        elif (turn := self._calls.starts.join(self._tenant)) is None:
            self._start_in_turn()
        else:
            self._turn = turn
            turn.add_done_callback(self._turn_came)

    def _turn_came(self, turn: asyncio.Future[None]) -> None:
        if self._turn is turn:  # else the call has left the line
            self._turn = None
            self._start_in_turn()

    def _start_in_turn(self) -> None:
        asyncio.get_running_loop().call_soon(self._calls.starts.give_back)
        self._start()

    def _start(self) -> None:
        (raw, compression), self._first = self._first, (b"", "")
        if self._messages is None:
            self._queued.add(-len(raw) - WAITING_BYTES)
        self._task = asyncio.get_running_loop().create_task(self._run(raw, compression))

    def on_half_close(self) -> None:
        if self._messages is not None:
            self._messages.put_nowait(None)
        elif not self._began:
            grpc_answers.refuse(self, BadRequest("the call ended before its message had come"))

    def on_reset(self) -> None:
        """The call counts until its task ends, so that a client whose calls are over faster than they end is refused."""
        if self._task is None:
            self._release()
        else:
            self._leave()
            self._calls.endings.end(self._end)

    def cut(self) -> None:
        """Ends the call, because the port closes."""
        self._stream.finish(http2_stream.UNAVAILABLE, "the gateway ends")
        self.on_reset()

    # The context.

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    @property
    def is_held(self) -> bool:
        return self._stream.is_held

    def send(self, event: message.Message) -> None:
        self._stream.send(self._method.encode(event))

    async def taken(self) -> None:
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream.wait(functools.partial(_tell, taken))
        await taken

    @property
    def is_costly(self) -> bool:
        return self._is_costly

    def give_up(self, waited_s: float) -> None:
        self._stream.give_up(waited_s)

    def end(self, code: int, told: str, further: list[tuple[bytes, bytes]]) -> None:
        self._release()
        self._stream.finish(code, told, further)

    # The call.

    async def _run(self, raw: bytes, compression: str) -> None:
        messages = self._messages
        made = self._answer(raw, compression) if messages is None else self._converse(messages)
        del raw
        try:
            await made
            self._stream.finish()
        except grpc_answers.Ended as ended:
            _forget(ended)
        except error_table.GatewayError as error:
            grpc_answers.refuse(self, error)
            _forget(error)
        except asyncio.CancelledError:
            self._stream.finish(http2_stream.CANCELLED)  # too late to be seen where something else has ended the call
            raise
        except Exception:
            logger.exception("a call over gRPC failed")
            grpc_answers.refuse(self, error_table.mistake_of_the_gateway())
        finally:
            self._task = None  # the task knows its error, whose frames know this object: a cycle would keep them all
            self._release()

    async def _answer(self, raw: bytes, compression: str) -> None:
        messages, method = self._calls.messages, self._method
        decoding = messages.decoded(raw, compression, method.kind, self._tenant)
        del raw
        async with decoding as decoded:
            request, self._is_costly = decoded.message, decoded.is_costly
            del decoded
            tenant = self._tenant or getattr(request, "tenant", "")
            if self._is_costly:
                await self._calls.costly.next(tenant)
            elif not self._tenant:
                await self._calls.starts.next(tenant)
            if self._caller is not None:
                self._caller.check_class(getattr(request, "slo_class", ""), "slo_class")
            answers = [await method.run(request, self)]
            del request
        if not method.gives_stream:
            # The answer is popped, so that no frame keeps it while its bytes wait for the client.
            await grpc_answers.write(self, self._calls.limits.write_s, answers.pop())

    async def _converse(self, messages: asyncio.Queue[tuple[bytes, str] | None]) -> None:
        requests = self._requests(messages)
        async with contextlib.aclosing(requests), contextlib.aclosing(self._method.run(requests, self)) as answers:
            async for answer in answers:
                await grpc_answers.write(self, self._calls.limits.write_s, answer)

    async def _requests(self, messages: asyncio.Queue[tuple[bytes, str] | None]) -> AsyncGenerator[Any, None]:
        while (waited := await messages.get()) is not None and self in self._calls.running:
            self._queued.add(-len(waited[0]) - WAITING_BYTES)
            await self._calls.costly.next(self._tenant)  # the answer to a few bytes of reflection takes long
            async with self._calls.messages.decoded(*waited, self._method.kind, self._tenant) as decoded:
                yield decoded.message

    def _late(self) -> None:
        limit_s = self._calls.limits.body_s
        grpc_answers.refuse(
            self, BadRequest(f"the message did not arrive within {limit_s:.3g} s", code="request_timeout")
        )

    def _deadline(self) -> None:
        self._stream.finish(http2_stream.DEADLINE_EXCEEDED, "the deadline that the client set for the call has passed")
        self.on_reset()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._held.release()

    def _release(self) -> None:
        """It is over; nothing of it counts any more."""
        self._held.release()
        self._leave()

    def _leave(self) -> None:
        self._queued.release()
        self._first = b"", ""
        if self._turn is not None:
            turn, self._turn = self._turn, None
            self._calls.starts.leave(turn)
            turn.cancel()
        self._calls.running.discard(self)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


def _forget(ended: BaseException | None) -> None:
    """Errors of the queue stand in cycles with their calls, and keep what the frames of their tracebacks know, such as the
    message. So the frames are cleared."""
    while ended is not None:
        traceback.clear_frames(ended.__traceback__)
        ended = ended.__context__


def _tell(taken: "asyncio.Future[None]") -> None:
    if not taken.done():
        taken.set_result(None)


def _left_s(head: http2_heads.Head) -> float | None:
    """The seconds that the client gives the call; None if it sets no time, or none that can be read."""
    found = _TIMEOUT.fullmatch(head.value("grpc-timeout"))
    return None if found is None else int(found[1]) * _UNIT_S[found[2]]
