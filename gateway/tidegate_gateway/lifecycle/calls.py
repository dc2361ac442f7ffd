"""From a parsed request to its answer: admission, placement, relay, and the one record of them all.

The edges call `Calls.answer` and deliver the bytes, or `Calls.hand_over` where a proxy does that. When the call is over,
metrics, spans and the log line are written from its record.
"""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from tidegate_gateway import gateway_settings
from tidegate_gateway.lifecycle import (
    admission,
    engine_client,
    engine_directory,
    handed_over,
    placement,
    relay,
    settlement,
)
from tidegate_gateway.observe import call_record, log_fields, prometheus_metrics, tracing_spans
from tidegate_gateway.openai import error_table, parsed_request
from tidegate_policy.model import Call, EngineId

logger = logging.getLogger("tidegate.gateway")


class Carrier(Protocol):
    """Brings a placed call to its engine: a relay, or a proxy."""

    async def begin(self) -> None:
        """Waits until the answer has begun, or the proxy may carry the call."""

    async def rest(self) -> None:
        """Waits for what is left after the answer."""

    def leave(self) -> None:
        """The call is over."""


C = TypeVar("C", bound=Carrier)


class Calls:
    """Answers calls."""

    def __init__(
        self,
        settings: gateway_settings.Settings,
        *,
        admission: admission.Admission,
        placements: placement.Placements,
        client: engine_client.EngineClient,
        directory: engine_directory.EngineDirectory,
        settlement: settlement.Settlement,
        metrics: prometheus_metrics.Metrics,
        traces: tracing_spans.Tracing | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.traces = traces
        self._timeouts = settings.timeouts
        self._fallbacks = settings.picker.fallbacks
        self._admission = admission
        self._placements = placements
        self._client = client
        self._directory = directory
        self._settlement = settlement
        self._metrics = metrics
        self._clock = clock
        self._wall = wall

    def answer(self, now: float, request: parsed_request.ParsedRequest) -> "Answer[relay.Relay]":
        """The answer to a request that arrived at `now`: an async context, entered once the answer has begun. Entering it
        raises `GatewayError`."""
        return Answer(self, now, request, self._relay)

    def hand_over(
        self,
        now: float,
        request: parsed_request.ParsedRequest,
        *,
        only: frozenset[EngineId] | None = None,
        on_wait: Callable[[Call], None],
    ) -> "Answer[handed_over.HandedOver]":
        """As `answer`, for a call whose bytes a proxy carries: the context is entered once the call has an engine, out of
        `only` if that is not None. `on_wait` is called with a call that does not get one at once."""

        def carry(admitted: admission.AdmittedRequest, answer: "Answer[Any]") -> handed_over.HandedOver:
            placed = self._place(admitted, answer, only)
            if placed.waits:
                on_wait(placed.call)
            return handed_over.HandedOver(
                admitted,
                placed,
                directory=self._directory,
                settlement=self._settlement,
                timeouts=self._timeouts,
                fallbacks=self._fallbacks,
                traceparent=_traceparent(answer),
                clock=self._clock,
                wall=self._wall,
            )

        return Answer(self, now, request, carry)

    async def begin(self, answer: "Answer[C]") -> C:
        """Admits the call, places it, and waits until its answer has begun. Raises `GatewayError`."""
        record = answer.record
        for name in answer.request.ignored:
            self._metrics.ignored_fields.labels(name).inc()
        admitted = await self._admission.admit(record.arrived_at_s, answer.request, record)
        answer.carrier = carrier = answer.carry(admitted, answer)
        await carrier.begin()
        return carrier

    def _place(
        self, admitted: admission.AdmittedRequest, answer: "Answer[Any]", only: frozenset[EngineId] | None = None
    ) -> placement.Placement:
        answer.placement = placed = self._placements.place(admitted.call, answer.record)
        placed.enter(self._directory.candidates(admitted.request.model, admitted.sequence_tokens, only))
        return placed

    def _relay(self, admitted: admission.AdmittedRequest, answer: "Answer[Any]") -> relay.Relay:
        return relay.Relay(
            admitted,
            self._place(admitted, answer),
            client=self._client,
            directory=self._directory,
            settlement=self._settlement,
            timeouts=self._timeouts,
            traceparent=_traceparent(answer),
            clock=self._clock,
            wall=self._wall,
        )

    def end(self, answer: "Answer[Any]", error: BaseException | None) -> None:
        """The call is over, with an error or without one: it leaves the gateway core, and its record is written."""
        try:
            if answer.carrier is not None:
                answer.carrier.leave()
        finally:
            if answer.placement is not None:
                answer.placement.leave()
            self._observe(answer.record, answer.trace, error)

    def _observe(
        self, record: call_record.CallRecord, trace: tracing_spans.Trace | None, error: BaseException | None
    ) -> None:
        """Writes the metrics, the log line and the spans of a call that is over."""
        if isinstance(error, error_table.GatewayError):
            record.failure = error.code
            if isinstance(error, error_table.Shed):
                record.shed = True
                self._metrics.shed.labels(error.reason.value).inc()
        elif isinstance(error, Exception) and not isinstance(error, OSError):  # else the client hung up
            record.outcome = record.failure = "internal_error"
        record.ended_at_s = self._clock()
        self._metrics.on_call(record)
        _log(record)
        if trace is not None:
            trace.end(record)


class Answer(Generic[C]):
    """One call from its admission to its end. It is a class, because an async generator costs each call several times as
    much."""

    __slots__ = ("_calls", "carrier", "carry", "placement", "record", "request", "trace")

    def __init__(
        self,
        calls: Calls,
        now: float,
        request: parsed_request.ParsedRequest,
        carry: Callable[[admission.AdmittedRequest, "Answer[Any]"], C],
    ) -> None:
        """`carry` places an admitted call and makes its carrier."""
        fields = request.fields
        self._calls = calls
        self.carry = carry
        self.request = request
        self.record = record = call_record.CallRecord(
            arrived_at_s=now,
            operation=request.endpoint.operation,
            model=request.model,
            stream=request.stream,
            slo_class=fields.slo_class or "",
            tenant=fields.tenant,
        )
        self.trace = None if calls.traces is None else calls.traces.begin(record, fields)
        self.placement: placement.Placement | None = None
        self.carrier: C | None = None

    async def __aenter__(self) -> C:
        try:
            return await self._calls.begin(self)
        except BaseException as error:
            self._calls.end(self, error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.carrier is not None and error is None:
                await self.carrier.rest()
        except BaseException as late:
            error = late
            raise
        finally:
            self._calls.end(self, error)


def _traceparent(answer: Answer[Any]) -> str | None:
    """The span that the engine's spans belong to."""
    return answer.request.fields.traceparent if answer.trace is None else answer.trace.traceparent


def _log(record: call_record.CallRecord) -> None:
    """The one INFO line of a call."""
    call = record.call
    if call is None or not logger.isEnabledFor(logging.INFO):
        return
    named = {"tenant": call.tenant, "class": call.slo_class, "workflow": call.workflow, "stage": call.stage}
    named["engine"] = record.engine
    logger.info(
        "call %s%s attempt=%d queue_ms=%d outcome=%s",
        call.id,
        log_fields.named(named),
        record.attempts,
        round(record.queue_s * 1000),
        record.outcome,
    )
