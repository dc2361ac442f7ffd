"""OpenTelemetry spans of a call: admit, queue, choose, stream; and the trace context that its engine continues.

Off unless a collector is set. The parent span is opened at arrival, so that the engine's spans can hang from
it; its children are written at the end, from the instants that the call has kept anyway: tracing costs the hot path nothing
in between. Attributes follow the GenAI conventions (still in development); no prompt, no answer.
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
from tidegate_gateway.lifecycle.relay import Serving
from tidegate_gateway.openai import parsed_request

logger = logging.getLogger("tidegate.gateway")

_CONTEXT = tracecontext.TraceContextTextMapPropagator()
_OPERATIONS: dict[parsed_request.Kind, str] = {"chat": "chat", "completion": "text_completion"}


class Trace:
    """The spans of one call."""

    def __init__(
        self, tracer: trace.Tracer, ask: parsed_request.Ask, now: float, wall_ns: Callable[[float], int]
    ) -> None:
        self._tracer = tracer
        self._wall_ns = wall_ns
        parent = _CONTEXT.extract({"traceparent": ask.traceparent}) if ask.traceparent else None
        operation = _OPERATIONS[ask.kind]
        self._root = tracer.start_span(
            f"{operation} {ask.model}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=wall_ns(now),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": ask.model,
                "tidegate.tenant": ask.tenant,
                "tidegate.class": ask.slo_class or "",
                "tidegate.workflow": ask.workflow or "",
                "tidegate.stage": ask.stage or "",
            },
        )
        self._context = trace.set_span_in_context(self._root)

    @property
    def traceparent(self) -> str:
        """The context for the engine."""
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, context=self._context)
        return carrier["traceparent"]

    def end(self, now: float, *, admitted_s: float | None, serving: Serving | None, error: str | None) -> None:
        """Writes what became of the call."""
        if serving is not None and admitted_s is not None:
            self._children(now, admitted_s, serving)
        if error is not None:
            self._root.set_attribute("error.type", error)
            self._root.set_status(trace.StatusCode.ERROR)
        self._root.end(self._wall_ns(now))

    def _children(self, now: float, admitted_s: float, serving: Serving) -> None:
        call = serving.job.call
        self._span("admit", call.arrival_s, admitted_s, {"tidegate.prompt_tokens.estimated": call.prompt_tokens})
        self._span("queue", admitted_s, serving.sent_s or now, {})
        if serving.sent_s is None or serving.decision is None:
            return
        decision = serving.decision
        chosen: dict[str, str | float] = {
            "server.address": decision.engine,
            "tidegate.rule": decision.rule,
            "tidegate.queue_s": decision.queue_s,
            "tidegate.service_s": decision.service_s,
        }
        if decision.slack_s is not None:
            chosen["tidegate.slack_s"] = decision.slack_s
        self._span("choose", serving.sent_s, serving.sent_s, chosen)
        if serving.first_s is not None:
            meter = serving.reply.meter
            self._root.set_attribute("gen_ai.usage.input_tokens", meter.prompt_tokens or call.prompt_tokens)
            self._root.set_attribute("gen_ai.usage.output_tokens", meter.generated)
            first = {"tidegate.first_token_s": serving.first_s - serving.sent_s}
            self._span("stream", serving.sent_s, serving.finished_s or now, first)

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

    def begin(self, ask: parsed_request.Ask, now: float) -> Trace:
        return Trace(self._tracer, ask, now, self._wall_ns)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def _wall_ns(self, instant_s: float) -> int:
        return self._offset_ns + round(instant_s * 1e9)


def to_collector(told: gateway_settings.Tracing, clock: Callable[[], float]) -> Tracing | None:
    """Tracing to an OTLP collector, None where none is set. Raises `BadSettings` where the exporter is not installed but
    required."""
    if told.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needs = f"spans for {told.endpoint} need the extra: pip install 'tidegate[tracing]'"
        if told.required:
            raise settings_decoder.BadSettings(f"tracing.endpoint: {needs}") from error
        logger.warning("%s; going on without", needs)
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "tidegate-gateway"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=told.endpoint)))
    return Tracing(provider, clock)
