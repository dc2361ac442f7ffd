"""Which engine gets this call? Drives the dispatcher: events with their instants in, its actions to the calls that wait.

The first part of a call's life. A `Placement` waits until the dispatcher has sent its call to an engine, gives a failed
attempt back, and reports progress and the end. The second part, `relay`, carries the bytes; an endpoint picker of a proxy
that carries the bytes itself needs the placement only.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from tidegate_gateway.lifecycle import watchdog
from tidegate_gateway.observe import background_loop, call_record, prometheus_metrics, recent_decisions
from tidegate_gateway.openai import error_table
from tidegate_policy import dispatcher
from tidegate_policy.model import Call, CallId, DropReason, EngineId, WorkflowId

logger = logging.getLogger("tidegate.gateway")

MOST_ATTEMPTS = 2
"""A call that an engine failed before its first token is tried once more, at another engine."""
MOST_BUSY_ATTEMPTS = 4
"""A full engine has not failed, but the search for room must end."""
RETRY_SHARE, FREE_RETRIES = 0.2, 3
"""Bounds of the retries under way: this share of the calls that are out, and never fewer than so many. Calls whose engine is
gone do not count, because no engine works on them any more."""
TICK_S = 0.1


class Placement:
    """One call in the dispatcher; an async context that takes the call out again."""

    def __init__(self, placements: "Placements", call: Call, record: call_record.CallRecord) -> None:
        self.call = call
        self.record = record
        self.begun = False
        """The engine has begun its answer, so the call cannot go to another engine any more."""
        self.watchdog = watchdog.Watchdog()
        self._placements = placements
        self._offer: asyncio.Future[dispatcher.Send] = asyncio.get_running_loop().create_future()
        self._trouble: error_table.EngineTrouble | None = None

    @property
    def retrying(self) -> bool:
        return self.record.attempts > 1 and not self.begun

    async def __aenter__(self) -> Self:
        self._placements.enter(self)
        if self._offer.done():
            self.record.dispatch_s = self._placements.clock() - self.record.arrived_at_s
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._offer.done() and not self._offer.cancelled():
            self._offer.exception()  # marks it as seen
        self._placements.leave(self)

    async def next_engine(self) -> dispatcher.Send:
        """Waits until the dispatcher has chosen an engine. Raises `GatewayError` when it drops the call."""
        try:
            send = await self._offer
        except error_table.Shed as shed:
            raise self._clearer(shed) from shed.__cause__
        record = self.record
        record.sent_at_s = self._placements.clock()
        record.engine, record.decision, record.attempts = send.decision.engine, send.decision, send.attempt
        self._placements.recent.remember(record)
        return send

    def attempt_failed(self, error: error_table.EngineTrouble) -> None:
        """The engine failed the call before its first token: gives it back, or raises when it was tried enough."""
        if error.failure == "too_long":
            raise error
        if error.failure == "busy":
            if self.record.attempts >= MOST_BUSY_ATTEMPTS:
                raise error_table.Shed(DropReason.SATURATED) from error
        else:
            free = error.failure == "gone"
            if self.record.attempts >= MOST_ATTEMPTS or not (free or self._placements.may_retry()):
                raise error
        logger.info("call %s on %s: %s; another engine is tried", self.call.id, self.record.engine, error)
        self._trouble = error
        self.record.engine = None
        self.watchdog.reset()
        self._offer = asyncio.get_running_loop().create_future()
        self._placements.give_back(self)

    def answered(self) -> None:
        """The first token, or the whole answer, is here."""
        self.begun = True
        self.progress(1)

    def progress(self, tokens: int) -> None:
        """So many tokens of the answer are here."""
        self._placements.core.on_progress(self._placements.clock(), self.call.id, tokens)

    def finished(self) -> None:
        """The engine has no more work with the call."""
        if self.record.engine is not None:
            self.record.calls_beside_at_end = self._placements.calls_at(self.record.engine)
        self._placements.finish(self.call.id)

    def offer(self, send: dispatcher.Send, calls_beside: int) -> None:
        """The dispatcher chose an engine, which has `calls_beside` other calls."""
        self.record.calls_beside = calls_beside
        if not self._offer.done():
            self._offer.set_result(send)

    def interrupt(self, error: error_table.GatewayError) -> None:
        """Ends the present wait of the call with this error."""
        if self._offer.done():
            self.watchdog.interrupt(error)
        else:
            self._offer.set_exception(error)

    def _clearer(self, shed: error_table.Shed) -> error_table.GatewayError:
        """The error for a client whose call has no engine left: the last engine's own failure says more."""
        if shed.reason is not DropReason.NO_ENGINES or self._trouble is None:
            return shed
        if self._trouble.failure == "busy":
            return error_table.Shed(DropReason.SATURATED, retry_after_s=shed.retry_after_s or 1.0)
        return self._trouble


class Placements:
    """The dispatcher, its clock, and the placements of all calls that are here."""

    def __init__(
        self,
        core: dispatcher.Dispatcher,
        metrics: prometheus_metrics.Metrics,
        *,
        recent: recent_decisions.RecentDecisions,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.clock = clock
        self._metrics = metrics
        self.recent = recent
        self._in_progress: dict[CallId, Placement] = {}

    def place(self, call: Call, record: call_record.CallRecord) -> Placement:
        """The placement of an admitted call, to be entered as an async context."""
        return Placement(self, call, record)

    # Reports about engines and workflows.

    def on_engine(self, state: dispatcher.EngineState) -> None:
        """The facts of an engine changed."""
        self._act(self.core.on_engine(self.clock(), state))

    def on_engine_gone(self, engine: EngineId) -> None:
        """Discovery no longer lists the engine."""
        self._act(self.core.on_engine_gone(self.clock(), engine))

    def on_engine_lost(self, engine: EngineId) -> None:
        """The engine is down: calls whose answers have not begun go to other engines at once."""
        for placement in list(self._in_progress.values()):
            if placement.record.engine == engine and not placement.begun:
                placement.interrupt(error_table.EngineTrouble("the engine stopped answering", failure="gone"))

    def on_engine_works(self, engine: EngineId, seconds: float) -> None:
        """The engine was seen to generate: its answers that are not streamed may take at least `seconds` more."""
        for placement in self._in_progress.values():
            if placement.record.engine == engine and not placement.begun:
                placement.watchdog.extend_timeout(seconds)

    def cancel_workflows(self, workflows: Iterable[WorkflowId]) -> None:
        """Ends the calls of cancelled workflows."""
        cancelled = set(workflows)
        for placement in list(self._in_progress.values()) if cancelled else ():
            if placement.call.workflow in cancelled:
                ended = "the workflow was cancelled; create another one"
                placement.interrupt(error_table.GatewayError("workflow_ended", ended))

    # The whole.

    @property
    def in_progress(self) -> int:
        """Calls that wait here or are out at engines."""
        return len(self._in_progress)

    @property
    def begun(self) -> int:
        """Calls whose answers have begun."""
        return sum(placement.begun for placement in self._in_progress.values())

    def calls_at(self, engine: EngineId) -> int:
        """Calls out at an engine, other gateways' included."""
        others = sum(state.others.calls for state in self.core.engines() if state.id == engine)
        return self.core.own_backlog(engine).calls + others

    def cut_all(self) -> None:
        """Sheds every call that is still here, because the gateway shuts down."""
        for placement in list(self._in_progress.values()):
            placement.interrupt(error_table.Shed(DropReason.DRAINING))

    async def drained(self) -> None:
        """Returns when no call is left."""
        while self._in_progress:
            await asyncio.sleep(0.02)

    async def run(self, loops: background_loop.BackgroundLoops) -> None:
        """Drops the calls whose time here is over, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.core.waiting:
                await loops.step("tick", self._tick)

    async def _tick(self) -> None:
        self._act(self.core.on_tick(self.clock()))

    # Reports of placements.

    def enter(self, placement: Placement) -> None:
        self._in_progress[placement.call.id] = placement
        self._act(self.core.on_arrival(self.clock(), placement.call))

    def give_back(self, placement: Placement) -> None:
        self._metrics.retries.inc()
        self._act(self.core.on_refused(self.clock(), placement.call.id))

    def finish(self, call: CallId) -> None:
        self._act(self.core.on_finish(self.clock(), call))

    def leave(self, placement: Placement) -> None:
        if self._in_progress.pop(placement.call.id, None) is not None:
            self._act(self.core.on_cancel(self.clock(), placement.call.id))

    def may_retry(self) -> bool:
        """Whether another retry fits the share of calls that may be retried at a time."""
        retrying = sum(placement.retrying for placement in self._in_progress.values())
        return retrying < max(FREE_RETRIES, RETRY_SHARE * self.core.out)

    def _act(self, actions: list[dispatcher.Action]) -> None:
        for action in actions:
            placement = self._in_progress.get(action.call.id)
            if placement is None:
                raise AssertionError(f"the dispatcher acts on call {action.call.id!r}, which is not here")
            if isinstance(action, dispatcher.Send):
                placement.offer(action, self.calls_at(action.decision.engine) - 1)
            else:
                placement.interrupt(error_table.Shed(action.reason, retry_after_s=action.retry_after_s))
