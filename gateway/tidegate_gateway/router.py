"""Carries out what the dispatcher decides.

The router feeds events to the pure state machine, one clock read each, and hands its actions to the servings that wait
for them; it starts no task of its own but the ticker. `admit` makes the calls, `engines` reports the engines, `web` and
`rpc` deliver the bytes.
"""

import asyncio
import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tidegate_gateway import client, errors, serving, settings, telemetry
from tidegate_gateway.serving import Clock, Job, Serving
from tidegate_policy import dispatcher
from tidegate_policy.model import CallId, Decision, DropReason, EngineId, WorkflowId

RETRY_SHARE, FREE_RETRIES = 0.2, 3
"""Retries under way at once: this share of the calls that are out, and never fewer than so many. Calls whose engine is gone
do not count: nobody works on them any more."""
TICK_S = 0.1
REMEMBERED = 50
"""Recent decisions kept for people to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """One decision, for people."""

    call: CallId
    at_s: float
    tenant: str
    slo_class: str
    attempt: int
    decision: Decision


class Router:
    """The dispatcher, its clock, and everyone who waits for its actions."""

    def __init__(
        self,
        core: dispatcher.Dispatcher,
        engine: client.Engine,
        meters: telemetry.Telemetry,
        *,
        timeouts: settings.Timeouts,
        address: Callable[[EngineId], str],
        on_attempt: Callable[[EngineId, bool], None],
        on_served: Callable[[Serving], None],
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.core = core
        self.engine = engine
        self.timeouts = timeouts
        self.clock = clock
        self.wall = wall
        self.address = address
        self.recent: collections.deque[Recent] = collections.deque(maxlen=REMEMBERED)
        self._meters = meters
        self._on_attempt = on_attempt
        self._on_served = on_served
        self._servings: dict[CallId, Serving] = {}

    def serve(self, job: Job) -> Serving:
        """The answer to a call, as an async context that is entered when it has begun. Raises `GatewayError` there."""
        return serving.Serving(self, job)

    # What the rest of the gateway reports.

    def on_engine(self, state: dispatcher.EngineState) -> None:
        """What is known of an engine changed."""
        self._act(self.core.on_engine(self.clock(), state))

    def on_engine_gone(self, engine: EngineId) -> None:
        """Discovery no longer lists the engine."""
        self._act(self.core.on_engine_gone(self.clock(), engine))

    def on_engine_lost(self, engine: EngineId) -> None:
        """The engine stopped answering: calls that it has not begun to answer go elsewhere at once."""
        for waiting in list(self._servings.values()):
            if waiting.engine == engine and not waiting.begun:
                waiting.stop(client.Gone("the engine stopped answering"))

    def on_engine_works(self, engine: EngineId) -> None:
        """The engine was seen to generate."""
        for waiting in self._servings.values():
            if waiting.engine == engine and not waiting.begun:
                waiting.hope()

    def cancel_workflows(self, workflows: Iterable[WorkflowId]) -> None:
        """Ends the calls of cancelled workflows that run here."""
        gone = set(workflows)
        for running in list(self._servings.values()) if gone else ():
            if running.job.call.workflow in gone:
                running.stop(errors.GatewayError("workflow_ended", "the workflow was cancelled; create another one"))

    def calls_at(self, engine: EngineId) -> int:
        """Calls out at an engine, other gateways' included."""
        others = sum(state.others.calls for state in self.core.engines() if state.id == engine)
        return self.core.own_backlog(engine).calls + others

    async def run(self) -> None:
        """Drops the calls whose time here is over, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.core.waiting:
                self._act(self.core.on_tick(self.clock()))

    @property
    def serving(self) -> int:
        """Calls that are here: waiting or out."""
        return len(self._servings)

    def cut(self) -> None:
        """Ends every call that is still here, with a refusal that says so."""
        for waiting in list(self._servings.values()):
            waiting.stop(errors.Refused(DropReason.DRAINING))

    async def drained(self) -> None:
        """Returns when no call is left."""
        while self._servings:
            await asyncio.sleep(0.02)

    # What servings report (`serving.Desk`).

    def enter(self, serving: Serving) -> None:
        self._servings[serving.job.call.id] = serving
        self._act(self.core.on_arrival(self.clock(), serving.job.call))

    def refused(self, serving: Serving) -> None:
        self._meters.retries.inc()
        self._act(self.core.on_refused(self.clock(), serving.job.call.id))

    def progress(self, call: CallId, tokens: int) -> None:
        self.core.on_progress(self.clock(), call, tokens)

    def finished(self, call: CallId) -> None:
        self._act(self.core.on_finish(self.clock(), call))

    def leave(self, serving: Serving) -> None:
        if self._servings.pop(serving.job.call.id, None) is not None:
            self._act(self.core.on_cancel(self.clock(), serving.job.call.id))
            self._on_served(serving)

    def outcome(self, engine: EngineId, *, ok: bool) -> None:
        self._on_attempt(engine, ok)

    def may_retry(self) -> bool:
        retrying = sum(waiting.retrying for waiting in self._servings.values())
        return retrying < max(FREE_RETRIES, RETRY_SHARE * self.core.out)

    def _act(self, actions: list[dispatcher.Action]) -> None:
        for action in actions:
            waiting = self._servings.get(action.call.id)
            if waiting is None:
                raise AssertionError(f"call {action.call.id!r} was moved but nobody serves it")
            if isinstance(action, dispatcher.Send):
                self._remember(action)
                waiting.placed(action, self.calls_at(action.decision.engine) - 1)
            else:
                waiting.stop(errors.Refused(action.reason, retry_after_s=action.retry_after_s))

    def _remember(self, send: dispatcher.Send) -> None:
        self.recent.append(
            Recent(
                call=send.call.id,
                at_s=self.clock(),
                tenant=send.call.tenant,
                slo_class=send.call.slo_class,
                attempt=send.attempt,
                decision=send.decision,
            )
        )
