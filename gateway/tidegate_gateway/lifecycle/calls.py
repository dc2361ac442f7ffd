"""From a parsed request to its answer: admission, placement, relay, and the one record of them all.

The edges call `Calls.answer` and deliver the bytes. When the call is over, metrics, spans and the log line are written from
its record.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from tidegate_gateway import gateway_settings
from tidegate_gateway.lifecycle import admission, engine_client, engine_directory, placement, relay, settlement
from tidegate_gateway.observe import call_record, log_lines, prometheus_metrics, tracing_spans
from tidegate_gateway.openai import error_table, parsed_request

logger = logging.getLogger("tidegate.gateway")


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
        self._admission = admission
        self._placements = placements
        self._client = client
        self._directory = directory
        self._settlement = settlement
        self._metrics = metrics
        self._clock = clock
        self._wall = wall

    @contextlib.asynccontextmanager
    async def answer(self, now: float, request: parsed_request.ParsedRequest) -> AsyncIterator[relay.Relay]:
        """The answer to a request that arrived at `now`, once the answer has begun. Raises `GatewayError`."""
        fields = request.fields
        record = call_record.CallRecord(
            arrived_at_s=now,
            operation=request.endpoint.operation,
            model=request.model,
            stream=request.stream,
            slo_class=fields.slo_class or "",
            tenant=fields.tenant,
        )
        trace = None if self.traces is None else self.traces.begin(record, fields)
        try:
            admitted = await self._admission.admit(now, request, record)
            async with (
                self._placements.place(admitted.call, record) as placed,
                relay.Relay(
                    admitted,
                    placed,
                    client=self._client,
                    directory=self._directory,
                    settlement=self._settlement,
                    timeouts=self._timeouts,
                    traceparent=fields.traceparent if trace is None else trace.traceparent,
                    clock=self._clock,
                    wall=self._wall,
                ) as answer,
            ):
                yield answer
        except error_table.GatewayError as error:
            record.failure = error.code
            if isinstance(error, error_table.Shed):
                record.shed = True
                self._metrics.shed.labels(error.reason.value).inc()
            raise
        finally:
            record.ended_at_s = self._clock()
            self._metrics.on_call(record)
            _log(record)
            if trace is not None:
                trace.end(record)


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
        log_lines.named(named),
        record.attempts,
        round(record.queue_s * 1000),
        record.outcome,
    )
