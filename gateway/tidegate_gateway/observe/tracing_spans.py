"""OpenTelemetry spans of a call: admit, queue, choose, stream; and the trace context that its engine continues.

Without a collector there are no spans. The parent span is opened at arrival, so that the engine's spans can be its
children. Our own children are written at the end from the instants in the call's record, so tracing costs the hot
path nothing in between. Attributes follow the GenAI conventions (still in development). Spans contain no prompt and
no answer.
"""

import logging
import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation import tracecontext

from tidegate_gateway import gateway_settings, settings_decoder
from tidegate_gateway.observe import call_record
from tidegate_gateway.openai import request_fields
from tidegate_policy.model import Call

logger = logging.getLogger("tidegate.gateway")

_CONTEXT = tracecontext.TraceContextTextMapPropagator()


class Trace:
    """The spans of one call."""

    def __init__(
        self,
        tracer: trace.Tracer,
        record: call_record.CallRecord,
        fields: request_fields.RequestFields,
        wall_ns: Callable[[float], int],
    ) -> None:
        self._tracer = tracer
        self._wall_ns = wall_ns
        parent = _CONTEXT.extract({"traceparent": fields.traceparent}) if fields.traceparent else None
        self._root = tracer.start_span(
            f"{record.operation} {record.model}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=wall_ns(record.arrived_at_s),
            attributes={
                "gen_ai.operation.name": record.operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": record.model,
                "tidegate.tenant": fields.tenant,
                "tidegate.class": fields.slo_class or "",
                "tidegate.workflow": fields.workflow or "",
                "tidegate.stage": fields.stage or "",
            },
        )
        self._context = trace.set_span_in_context(self._root)

    @property
    def traceparent(self) -> str:
        """The context for the engine."""
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, context=self._context)
        return carrier["traceparent"]

    def end(self, record: call_record.CallRecord) -> None:
        """Writes the spans of a call that ended."""
        ended_at_s = record.arrived_at_s if record.ended_at_s is None else record.ended_at_s
        if record.call is not None and record.admitted_at_s is not None:
            self._children(record, record.call, record.admitted_at_s, ended_at_s)
        failure = record.failure
        if failure is None and record.call is not None and record.outcome != "ok":
            failure = record.outcome
        if failure is not None:
            self._root.set_attribute("error.type", failure)
            self._root.set_status(trace.StatusCode.ERROR)
        self._root.end(self._wall_ns(ended_at_s))

    def _children(self, record: call_record.CallRecord, call: Call, admitted_at_s: float, ended_at_s: float) -> None:
        estimated = {"tidegate.prompt_tokens.estimated": call.prompt_tokens}
        self._span("admit", record.arrived_at_s, admitted_at_s, estimated)
        self._span("queue", admitted_at_s, record.sent_at_s or ended_at_s, {})
        if record.sent_at_s is None or record.decision is None:
            return
        decision = record.decision
        chosen: dict[str, str | float] = {
            "server.address": decision.engine,
            "tidegate.rule": decision.rule,
            "tidegate.engine_wait_s": decision.queue_s,
            "tidegate.service_s": decision.service_s,
            "tidegate.shared_s": decision.shared_s,
        }
        if decision.slack_s is not None:
            chosen["tidegate.slack_s"] = decision.slack_s
        self._span("choose", record.sent_at_s, record.sent_at_s, chosen)
        if record.first_token_at_s is not None:
            self._root.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens or call.prompt_tokens)
            self._root.set_attribute("gen_ai.usage.output_tokens", record.tokens)
            first = {"tidegate.first_token_s": record.first_token_at_s - record.sent_at_s}
            self._span("stream", record.sent_at_s, record.finished_at_s or ended_at_s, first)

    def _span(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, str | float]) -> None:
        span = self._tracer.start_span(
            name, context=self._context, start_time=self._wall_ns(start_s), attributes=dict(attributes)
        )
        span.end(self._wall_ns(end_s))


class Tracing:
    """Opens traces; instants of the gateway's clock become wall time here."""

    def __init__(self, provider: TracerProvider, clock: Callable[[], float]) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tidegate.gateway")
        self._offset_ns = time.time_ns() - round(clock() * 1e9)

    def begin(self, record: call_record.CallRecord, fields: request_fields.RequestFields) -> Trace:
        """Opens the trace of a call that just arrived."""
        return Trace(self._tracer, record, fields, self._wall_ns)

    def close(self) -> None:
        """Sends the spans that are not sent yet."""
        self._provider.shutdown()

    def _wall_ns(self, instant_s: float) -> int:
        return self._offset_ns + round(instant_s * 1e9)


def to_collector(settings: gateway_settings.Tracing, clock: Callable[[], float]) -> Tracing | None:
    """Tracing to an OTLP collector, None where none is set. Raises `BadSettings` where the exporter is not installed but
    required."""
    if settings.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needs = f"spans for {settings.endpoint} need the extra: pip install 'tidegate[tracing]'"
        if settings.required:
            raise settings_decoder.BadSettings(f"tracing.endpoint: {needs}") from error
        logger.warning("%s; the gateway goes on without spans", needs)
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "tidegate-gateway"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
    return Tracing(provider, clock)
