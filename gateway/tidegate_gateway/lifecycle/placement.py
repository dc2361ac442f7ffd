"""Which engine gets this call? Drives the gateway core: events with their instants in, its actions to the calls that wait.

The first part of a call's life. A `Placement` waits until the core has sent its call to an engine, reports failed attempts,
progress and the end. The second part, `relay`, carries the bytes. An endpoint picker, whose proxy carries the bytes, needs
the placement only. All decisions are the core's.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Container, Iterable, Mapping

from tidegate_gateway import loop_steps
from tidegate_gateway.lifecycle import context_lengths, watchdog
from tidegate_gateway.observe import call_record, prometheus_metrics, recent_decisions
from tidegate_gateway.openai import error_table
from tidegate_policy import gateway_core
from tidegate_policy.admit import retries
from tidegate_policy.dispatch import core_actions, dispatcher, engine_table, traffic_split
from tidegate_policy.model import Backlog, Call, CallId, DropReason, EngineId, WorkflowId

logger = logging.getLogger("tidegate.gateway")


class Placement:
    """One call in the gateway core, from `enter` to `leave`."""

    def __init__(self, placements: "Placements", call: Call, record: call_record.CallRecord) -> None:
        self.call = call
        self.record = record
        self.begun = False
        """The engine has begun its answer, so the call cannot go to another engine any more."""
        self.ended = False
        """The core knows that the call ended."""
        self.watchdog = watchdog.Watchdog()
        self._placements = placements
        self._offer: asyncio.Future[core_actions.Send] = asyncio.get_running_loop().create_future()
        self._trouble: error_table.EngineTrouble | None = None
        self._only: Container[EngineId] | None = None
        self._doubted: EngineId | None = None
        """The engine that rejected the call, as it did others before."""

    def enter(self, only: Container[EngineId] | None = None) -> None:
        """Passes the call to the core. It may go to these engines only; None = to all."""
        self._only = only
        self._placements.enter(self, only)
        if self._offer.done() and self._offer.exception() is None:
            self.record.dispatch_s = self._placements.clock() - self.record.arrived_at_s

    @property
    def waits(self) -> bool:
        """The core has not chosen an engine yet."""
        return not self._offer.done()

    def leave(self) -> None:
        """Takes the call out of the core again."""
        if self._offer.done() and not self._offer.cancelled() and self._offer.exception() is not None:
            # Its error knows the frames of the call, and they know this object: a cycle would keep all that they have.
            self._offer = asyncio.get_running_loop().create_future()
            self._offer.cancel()
        self._trouble = None  # the core may have raised it again, and then the same is true of it
        self.watchdog.close()
        self._placements.leave(self)

    @property
    def offer(self) -> "asyncio.Future[core_actions.Send]":
        """The engine that the core chooses. It raises `GatewayError` when the core sheds the call or gives it up."""
        return self._offer

    def sent(self, send: core_actions.Send) -> None:
        """The call goes to the engine that the core chose."""
        record = self.record
        record.sent_at_s = self._placements.clock()
        record.engine, record.decision = send.decision.engine, send.decision
        record.call = send.call  # as it was predicted last, and as the engine receives it
        record.attempts = send.attempt
        self._placements.recent.remember(record)

    def fallbacks(self, most: int) -> list[EngineId]:
        """At most so many engines beside that of the call, for a proxy that sends it again."""
        placements, chosen = self._placements, self.record.engine
        if chosen is None or not most:
            return []
        now, tenant = placements.clock(), self.call.tenant
        return placements.core.engines.fallbacks(now, tenant, chosen, self._only, most)

    def attempt_failed(self, error: error_table.EngineTrouble) -> None:
        """The engine failed the call before its first token; `offer` is the core's answer to that."""
        failure, engine = retries.Failure(error.failure), self.record.engine
        if retries.blames_engine(failure):
            self.report_engine(ok=False)
        self._trouble = error
        error.__traceback__ = error.__cause__ = error.__context__ = None  # an answer of many megabytes hangs on them
        self.record.engine = None
        self.watchdog.reset()
        self._offer = asyncio.get_running_loop().create_future()
        self._placements.attempt_failed(self.call.id, failure)
        if self._offer.done() and self._offer.exception() is not None:
            self.record.engine = engine
        else:
            logger.info("call %s on %s: %s; another engine is tried", self.call.id, engine, error)

    def report_engine(self, *, ok: bool, lost: bool = False) -> None:
        """The engine did its part in the call, or failed it; `lost`: after its answer had begun."""
        if self.record.engine is not None:
            self._placements.report_engine(self.record.engine, self.call.tenant, ok=ok, lost=lost)

    def doubts_rejection(self) -> str | None:
        """The engine rejected the call as wrong. Why another engine should be asked; None = the rejection stands."""
        engine = self.record.engine
        if engine is None:
            return None
        if isinstance(self._only, context_lengths.Fitting) and self._only.outgrows(engine):
            return "the engine's context may be too short"
        if not self._placements.core.engines.on_rejection(self._placements.clock(), engine, self.call.tenant):
            return None
        self._doubted = engine
        return "the engine rejects this call as it did those before"

    def on_second_opinion(self, *, ok: bool) -> None:
        """Another engine answers (`ok`) or rejects the call that the first one has rejected."""
        first, self._doubted = self._doubted, None
        if first is not None and self.record.engine is not None:
            self._placements.on_second_opinion(first, self.call.tenant, self.record.engine, answers=ok)

    def answered(self, *, rejects: bool = False) -> None:
        """The first token, or the whole answer, is here. `rejects`: the engine did no work for it."""
        self.begun = True
        if not rejects:
            self._placements.answered(self.call.id)

    def progress(self, tokens: int) -> None:
        """So many tokens of the answer are here."""
        self._placements.core.on_progress(self._placements.clock(), self.call.id, tokens)

    def finished(self, *, ok: bool, rejected: bool = False) -> None:
        """The engine has no more work with the call; the core learns from a whole answer. `rejected`: the engine found the
        call wrong."""
        self.ended = True
        if ok:
            self.report_engine(ok=True)
        self._placements.finished(self.call.id, self.record.result(ok=ok, rejected=rejected))

    def on_send(self, send: core_actions.Send) -> None:
        """The core chose an engine."""
        if not self._offer.done():
            self._offer.set_result(send)

    def shed(self, reason: DropReason, retry_after_s: float) -> None:
        """The core shed the call. If the last engine is the cause, its failure tells the client more."""
        if reason is DropReason.NO_ENGINES and self._trouble is not None:
            self.give_up(retry_after_s)
        else:
            self.interrupt(error_table.Shed(reason, retry_after_s=retry_after_s))

    def give_up(self, retry_after_s: float = 1.0) -> None:
        """The core tries the call no more: the client gets the failure of the last engine."""
        if self._trouble is None or self._trouble.failure == "busy":
            self.interrupt(error_table.Shed(DropReason.SATURATED, retry_after_s=retry_after_s))
        else:
            self.interrupt(self._trouble)

    def interrupt(self, error: error_table.GatewayError) -> None:
        """Ends the present wait of the call with this error."""
        if self._offer.done():
            self.watchdog.interrupt(error)
        else:
            self._offer.set_exception(error)


class Placements:
    """The gateway core, its clock, and the placements of all calls that are here."""

    def __init__(
        self,
        core: gateway_core.GatewayCore,
        metrics: prometheus_metrics.Metrics,
        recent: recent_decisions.RecentDecisions,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.clock = clock
        self.recent = recent
        self._metrics = metrics
        self._in_progress: dict[CallId, Placement] = {}
        self._endings = loop_steps.Endings()

    def place(self, call: Call, record: call_record.CallRecord) -> Placement:
        """The placement of an admitted call."""
        return Placement(self, call, record)

    # Reports about engines and workflows.

    def on_engine(self, facts: engine_table.EngineFacts) -> None:
        """The facts of an engine changed."""
        self._metrics.engines.of(facts.id)
        self._act(self.core.on_engine(self.clock(), facts))

    def on_others(self, others: Mapping[EngineId, Backlog]) -> None:
        """The backlogs that other gateways have at the engines changed."""
        self._act(self.core.on_others(self.clock(), others))

    def on_engine_gone(self, engine: EngineId) -> None:
        """Discovery no longer lists the engine."""
        self._metrics.engines.forget(engine)
        self._act(self.core.on_engine_gone(self.clock(), engine))

    def on_engine_down(self, engine: EngineId) -> None:
        """The engine is down: calls whose answers have not begun go to other engines at once."""
        for placement in list(self._in_progress.values()):
            if placement.record.engine == engine and not placement.begun:
                self._endings.end(functools.partial(self._engine_stopped, placement, engine))

    def divide(self, split: traffic_split.TrafficSplit | None) -> None:
        """Divides the calls among two revisions of the engines from here on, and counts how each engine serves."""
        self._metrics.engines.counts |= split is not None
        self.core.on_split(split)

    def on_prefix_cache(self, engine: EngineId, *, exists: bool) -> None:
        """The metrics of the engine show whether it has a prefix cache."""
        self.core.dispatcher.prefixes.on_prefix_cache(engine, exists=exists)

    def on_engine_restarted(self, engine: EngineId) -> None:
        """The engine counts its tokens from zero again: its cache is empty."""
        self.core.on_cache_lost(engine)

    @staticmethod
    def _engine_stopped(placement: Placement, engine: EngineId) -> None:
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
                self._endings.end(functools.partial(self._workflow_cancelled, placement))

    @staticmethod
    def _workflow_cancelled(placement: Placement) -> None:
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

    def cut_all(self) -> None:
        """Sheds every call that is still here, because the gateway shuts down."""
        for placement in list(self._in_progress.values()):
            placement.interrupt(error_table.Shed(DropReason.DRAINING))

    def on_tick(self) -> bool:
        """Tells the core that time has passed, if calls wait. Returns whether it is to be told again at once."""
        if not self.core.dispatcher.waiting:
            return False
        actions = self.core.on_tick(self.clock())
        self._act(actions)
        return len(actions) >= dispatcher.EXPIRED_AT_ONCE

    # Reports of placements.

    def enter(self, placement: Placement, only: Container[EngineId] | None) -> None:
        self._in_progress[placement.call.id] = placement
        self._act(self.core.on_arrival(self.clock(), placement.call, only))

    def attempt_failed(self, call: CallId, failure: retries.Failure) -> None:
        self._act(self.core.on_attempt_failed(self.clock(), call, failure))

    def answered(self, call: CallId) -> None:
        self._act(self.core.on_first_token(self.clock(), call))

    def report_engine(self, engine: EngineId, tenant: str, *, ok: bool, lost: bool = False) -> None:
        self._metrics.engines.on_attempt(engine, ok=ok)
        result = self.core.on_engine_result(self.clock(), engine, tenant, ok=ok, lost=lost)
        if result.ejected_s is not None:
            logger.warning("engine %s is ejected for %.3g s: its calls fail", engine, result.ejected_s)
        elif result.avoided_s is not None:
            logger.warning(
                "calls of tenant %s avoid engine %s for %.3g s: it fails them", tenant, engine, result.avoided_s
            )

    def on_second_opinion(self, engine: EngineId, tenant: str, by: EngineId, *, answers: bool) -> None:
        if answers:
            self._metrics.engines.on_attempt(engine, ok=False)
        ejection_s = self.core.engines.on_second_opinion(self.clock(), engine, tenant, by, answers=answers)
        if ejection_s is not None:
            logger.warning("engine %s is ejected for %.3g s: it rejects calls that others answer", engine, ejection_s)

    def finished(self, call: CallId, result: gateway_core.CallResult) -> None:
        self._act(self.core.on_end(self.clock(), call, result))

    def workflow_over(self, workflow: WorkflowId, ok: bool, uncalled: list[str]) -> None:
        """The workflow is done (`ok`), or was cancelled or has expired. No call came for its stages `uncalled`."""
        self._act(self.core.on_workflow_end(self.clock(), workflow, ok=ok, uncalled=uncalled))

    def leave(self, placement: Placement) -> None:
        if self._in_progress.pop(placement.call.id, None) is not None and not placement.ended:
            self._act(self.core.on_cancel(self.clock(), placement.call.id))

    def _act(self, actions: list[core_actions.Action]) -> None:
        are_many, strays = len(actions) > loop_steps.ENDS_AT_ONCE, list[CallId]()
        for action in actions:
            placement = self._in_progress.get(action.call.id)
            if placement is None:
                logger.error("the gateway core acts on call %r, which is not here", action.call.id)
                strays.append(action.call.id)
                continue  # the other calls must get their actions
            match action:
                case core_actions.Send():
                    if action.attempt > 1:
                        self._metrics.retries.inc()
                    placement.on_send(action)
                case core_actions.Shed():
                    if are_many:
                        self._endings.end(functools.partial(placement.shed, action.reason, action.retry_after_s))
                    else:
                        placement.shed(action.reason, action.retry_after_s)
                case core_actions.GiveUp():
                    placement.give_up()
        for call_id in strays:
            self._act(self.core.on_cancel(self.clock(), call_id))
