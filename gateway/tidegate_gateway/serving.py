"""One call from its arrival to its last byte, in the task of its own request.

`Serving` waits until the dispatcher has placed the call, sends it, moves it to another engine if the first fails it before
its first token, reads its answer with a watchdog on every token, and settles it, whatever happens. Cancelling the task
(the client hung up) closes the engine's connection on the way out. `router` owns the dispatcher and all servings.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tidegate_gateway import client, errors, settings, sse, wire
from tidegate_policy import dispatcher
from tidegate_policy.model import Call, CallId, Decision, DropReason, EngineId

logger = logging.getLogger("tidegate.gateway")

T = TypeVar("T")
Clock = Callable[[], float]

MOST_ATTEMPTS = 2
"""A call that an engine failed before its first token is tried once more, elsewhere."""
MOST_BUSY_ATTEMPTS = 4
"""A full engine is no failure, but the search for room must end."""
PROGRESS_TOKENS = 16
"""Between two reports of a stream's progress to the dispatcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A call and what is needed to carry it out."""

    call: Call
    ask: wire.Ask
    on_end: Callable[[sse.Meter | None, bool], Awaitable[None]]
    """Awaited with what the answer has told (None: it did not begin) and whether it is whole, before the client can know:
    what a client has seen is recorded."""
    on_cut: Callable[[sse.Meter | None], None]
    """Called instead when the client went away."""


class TooLong(errors.EngineTrouble):
    """An answer that is not streamed is longer than we wait: the engine works, so it is not blamed, and none is tried."""


class Desk(Protocol):
    """What a serving needs of its router."""

    engine: client.Engine
    timeouts: settings.Timeouts
    clock: Clock
    wall: Clock

    def address(self, engine: EngineId) -> str: ...
    def enter(self, serving: "Serving") -> None: ...
    def refused(self, serving: "Serving") -> None: ...
    def progress(self, call: CallId, tokens: int) -> None: ...
    def finished(self, call: CallId) -> None: ...
    def leave(self, serving: "Serving") -> None: ...
    def outcome(self, engine: EngineId, *, ok: bool) -> None: ...
    def may_retry(self) -> bool: ...


class Serving:
    """The life of one call; an async context that is entered when the answer has begun."""

    def __init__(self, desk: Desk, job: Job) -> None:
        self.job = job
        self.engine: EngineId | None = None
        self.decision: Decision | None = None
        self.begun = False
        self.attempt = 0
        self.beside = 0
        """Other calls at the engine when this one was sent."""
        self.dispatch_s: float | None = None
        """From arrival to a place, if the call did not have to wait for one: what the gateway itself costs."""
        self.sent_s: float | None = None
        self.first_s: float | None = None
        self.finished_s: float | None = None
        self.outcome = "cancelled"
        """ok, cancelled, rejected (the engine's 4xx) or the code of an error."""
        self._desk = desk
        self._reply: client.Reply | None = None
        self._placing: asyncio.Future[dispatcher.Send] | None = None
        self._timer: asyncio.Timeout | None = None
        self._answer_by_s = 0.0
        """On the event loop's clock: when an answer that is not streamed is given up at the latest."""
        self._stopped: errors.GatewayError | None = None
        self._reported = 0
        self._ended = False
        self._trouble: errors.EngineTrouble | None = None

    @property
    def reply(self) -> client.Reply:
        if self._reply is None:
            raise AssertionError("the answer has not begun")
        return self._reply

    @property
    def queue_s(self) -> float:
        """Seconds that the call waited in the gateway."""
        return 0.0 if self.sent_s is None else self.sent_s - self.job.call.arrival_s

    @property
    def slack_s(self) -> float | None:
        """Seconds to spare as predicted when the call was sent; None without a deadline."""
        return None if self.decision is None else self.decision.slack_s

    @property
    def retrying(self) -> bool:
        return self.attempt > 1 and not self.begun

    async def next_block(self) -> bytes:
        """The next bytes for the client; b"" at the end. Raises `GatewayError` when the stream fails."""
        reply = self.reply
        if reply.meter.done:
            return b""
        try:
            block = await self._within(self._desk.timeouts.next_token_s, reply.next_block(), "sent nothing more")
        except errors.GatewayError as error:
            self.outcome = error.code
            if isinstance(error, errors.EngineTrouble):
                self._tell(ok=False)
            await self._end(ok=False)
            raise
        await self._account(reply)
        return block

    # What the router says.

    def placed(self, send: dispatcher.Send, beside: int) -> None:
        """The dispatcher found an engine, which has `beside` other calls."""
        self.beside = beside
        if self._placing is not None and not self._placing.done():
            self._placing.set_result(send)

    def stop(self, why: errors.GatewayError) -> None:
        """Ends whatever the call waits for, with this error."""
        if self._placing is not None and not self._placing.done():
            self._placing.set_exception(why)
            return
        self._stopped = why
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    def hope(self) -> None:
        """The engine generates: an answer that is not streamed, and so shows no first token, may still be on its way."""
        if self._timer is None or self._stopped is not None or self._timer.expired() or self.job.ask.stream:
            return
        due_s = asyncio.get_running_loop().time() + self._desk.timeouts.first_token_s
        self._timer.reschedule(min(max(due_s, self._timer.when() or 0.0), self._answer_by_s))

    # Its life.

    async def __aenter__(self) -> Self:
        self._placing = asyncio.get_running_loop().create_future()
        try:
            self._desk.enter(self)
            if self._placing.done():
                self.dispatch_s = self._desk.clock() - self.job.call.arrival_s
            await self._begin()
        except errors.GatewayError as error:
            self.outcome = error.code
            try:
                await self._end(ok=False)
            finally:
                self._leave()
            raise
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._reply is not None and kind is None:
                await self._reply.rest()
        finally:
            self._leave()

    async def _begin(self) -> None:
        """Places the call and opens its answer; a failure before the first token is tried again elsewhere."""
        while True:
            if self._placing is None:
                raise AssertionError("nobody asked for a place")
            try:
                send = await self._placing
            except errors.Refused as refused:
                raise self._worse(refused) from refused.__cause__
            self._placing = None
            self.sent_s = self._desk.clock()
            self.engine, self.decision, self.attempt = send.decision.engine, send.decision, send.attempt
            try:
                self._reply = await self._open(self.sent_s, send)
                break
            except errors.EngineTrouble as error:
                self._again(error)
        self.begun, self.first_s = True, self._desk.clock()
        self._tell(ok=True)
        self._desk.progress(self.job.call.id, 1)
        await self._account(self._reply)

    async def _open(self, now: float, send: dispatcher.Send) -> client.Reply:
        desk, ask, decision = self._desk, self.job.ask, send.decision
        body = wire.write(now, desk.wall(), ask, send.call, decision.service_s)
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{send.call.id}-{send.attempt}"}
        if ask.traceparent:
            headers["traceparent"] = ask.traceparent
        opening = desk.engine.open(
            desk.address(decision.engine),
            wire.PATHS[ask.kind],
            body,
            headers,
            wants_usage=ask.wants_usage if ask.stream else None,
        )
        patience_s = desk.timeouts.first_token_s + 3 * (decision.queue_s + decision.service_s)
        most_s = max(patience_s, desk.timeouts.answer_s)
        self._answer_by_s = asyncio.get_running_loop().time() + most_s
        try:
            return await self._within(patience_s, opening, "did not begin its answer")
        except errors.EngineTrouble as error:
            in_time = ask.stream or asyncio.get_running_loop().time() < self._answer_by_s
            if in_time or error.code != "engine_timeout":
                raise
            late = f"the engine still worked on the answer after {most_s:.3g} s"
            raise TooLong(late, code=error.code, advice="stream it, or ask for fewer tokens") from error

    def _again(self, error: errors.EngineTrouble) -> None:
        """Gives the call back to the dispatcher, or raises when it has been tried enough."""
        if isinstance(error, TooLong):
            raise error
        if isinstance(error, client.Busy):
            if self.attempt >= MOST_BUSY_ATTEMPTS:
                raise errors.Refused(DropReason.SATURATED) from error
        else:
            self._tell(ok=False)
            if self.attempt >= MOST_ATTEMPTS or not (isinstance(error, client.Gone) or self._desk.may_retry()):
                raise error
        logger.info("call %s on %s: %s; another engine is tried", self.job.call.id, self.engine, error)
        self._trouble = error
        self.engine = self._stopped = None
        self._placing = asyncio.get_running_loop().create_future()
        self._desk.refused(self)

    def _worse(self, refused: errors.Refused) -> errors.GatewayError:
        """What to tell a client when no engine is left to try: what the last one did says more."""
        if refused.reason is not DropReason.NO_ENGINES or self._trouble is None:
            return refused
        if isinstance(self._trouble, client.Busy):
            return errors.Refused(DropReason.SATURATED, retry_after_s=refused.retry_after_s or 1.0)
        return self._trouble

    async def _account(self, reply: client.Reply) -> None:
        """Books what the last block told; records a complete answer before its last bytes go out."""
        meter, call = reply.meter, self.job.call
        if not meter.done:
            if meter.tokens - self._reported >= PROGRESS_TOKENS:
                self._reported = meter.tokens
                self._desk.progress(call.id, meter.tokens)
            return
        self.finished_s = self._desk.clock()
        self._desk.finished(call.id)
        if reply.status != 200 or meter.failed:
            self.outcome = "engine_failed" if meter.failed else "rejected"
            if meter.failed:
                self._tell(ok=False)
            await self._end(ok=False)
            return
        await self._end(ok=True)
        self.outcome = "ok"

    async def _end(self, *, ok: bool) -> None:
        if not self._ended:
            self._ended = True  # from here on: who hangs up while the end is recorded has been served
            await self.job.on_end(self._told(), ok)

    def _told(self) -> sse.Meter | None:
        return None if self._reply is None else self._reply.meter

    def _tell(self, *, ok: bool) -> None:
        if self.engine is not None:
            self._desk.outcome(self.engine, ok=ok)

    def _leave(self) -> None:
        if self._reply is not None:
            self._reply.close()
        if self._placing is not None and self._placing.done() and not self._placing.cancelled():
            self._placing.exception()  # seen: nobody else waits for it
        if not self._ended:
            self.job.on_cut(self._told())
        self._desk.leave(self)

    async def _within(self, seconds: float, step: Coroutine[Any, Any, T], what: str) -> T:
        if self._stopped is not None:
            step.close()
            raise self._stopped
        try:
            async with asyncio.timeout(seconds) as self._timer:
                return await step
        except TimeoutError as error:
            late = errors.EngineTrouble(f"the engine {what} within {seconds:.3g} s", code="engine_timeout")
            raise (self._stopped or late) from error
        finally:
            self._timer = None
