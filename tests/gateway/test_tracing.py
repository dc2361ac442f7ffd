"""Spans of a call, as a collector would get them."""

import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import fake_engine
from tidegate_gateway import app, gateway_settings, settings_decoder
from tidegate_gateway.observe import tracing_spans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(client: Any) -> InMemorySpanExporter:
    """Lets the running gateway trace into memory."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    client.gateway.calls.traces = tracing_spans.Tracing(provider, client.gateway.clock)
    return spans


async def test_a_call_is_a_span_with_its_stages_and_the_engine_continues_it(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        spans = traced(client)
        await client.ask(
            "/v1/completions", prompt="a-secret", headers={"traceparent": PARENT, "x-tidegate-tenant": "t"}
        )
        found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"text_completion fake", "admit", "queue", "choose", "stream"}
    root = found["text_completion fake"]
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
    assert engine.headers[0]["traceparent"].split("-")[1:3] == [PARENT.split("-")[1], f"{root.context.span_id:016x}"]
    assert (root.attributes["gen_ai.usage.output_tokens"], root.attributes["tidegate.tenant"]) == (4, "t")
    assert root.start_time <= found["admit"].start_time <= found["queue"].start_time <= found["stream"].start_time
    assert found["stream"].end_time <= root.end_time
    assert found["choose"].attributes["tidegate.shared_s"] == 0
    assert "a-secret" not in str([span.to_json() for span in found.values()])


async def test_a_shed_call_is_an_error_span(up: Any) -> None:
    async with up(store=False) as client:
        spans = traced(client)
        await client.ask()
        (root,) = [span for span in spans.get_finished_spans() if span.name == "chat fake"]
    assert root.attributes["error.type"] == "no-engines"
    assert not root.status.is_ok


async def test_an_endpoint_of_the_environment_without_the_exporter_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    listen = {"port": 0, "adminPort": None, "grpcPort": None}
    bare = gateway_settings.from_mapping({"listen": listen, "timeouts": {"drain": "0s"}})
    told = gateway_settings.from_environment(bare, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"})
    async with app.serving(told) as bound:
        assert bound.gateway.calls.traces is None
    assert "tidegate[tracing]" in caplog.text
    asked = gateway_settings.from_mapping({"listen": listen, "tracing": {"endpoint": "http://127.0.0.1:4317"}})
    with pytest.raises(settings_decoder.BadSettings, match=r"tracing\.endpoint"):
        async with app.serving(asked):
            pass
