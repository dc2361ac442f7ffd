"""The counters that alerts read: ended calls that had a target, by what became of the target."""

import asyncio
import hashlib
import logging
import pathlib
from typing import Any

import grpc
import pytest
import troubled_engines
from prometheus_client import exposition

import fake_engine
from tidegate_gateway.observe import prometheus_metrics
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

CLASSES = [
    {"name": "patient", "deadline": "10m"},
    {"name": "hasty", "ttft": "1ms"},
    {"name": "free"},
    {"name": "spare", "deadline": "10m", "sheddable": True},
]


def counts(client: Any, metric: str = "tidegate_slo_calls") -> dict[tuple[str, ...], float]:
    """By class (or tenant) and outcome."""
    return {
        (sample.labels.get("class") or sample.labels["tenant"], sample.labels["outcome"]): sample.value
        for family in client.gateway.metrics.registry.collect()
        if family.name == metric
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_calls_with_a_target_count_as_met_or_late_and_others_do_not_count(up: Any) -> None:
    async with fake_engine.engine(tokens=3, first_s=1.0) as engine, up(engine, classes=CLASSES) as client:
        for name in ("patient", "hasty", "free"):
            async with client.openai() as api:
                stream = await api.chat.completions.create(
                    model="fake",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    extra_headers={"x-tidegate-class": name, "x-tidegate-tenant": "search"},
                )
                async for _ in stream:
                    pass
        assert counts(client) == {("patient", "met"): 1, ("hasty", "late"): 1}
        assert counts(client, "tidegate_tenant_slo_calls") == {("search", "met"): 1, ("search", "late"): 1}


async def test_a_call_that_fails_or_is_shed_missed_its_target(up: Any) -> None:
    async with fake_engine.engine(status=500) as engine, up(engine, classes=CLASSES) as client:
        await client.ask(headers={"x-tidegate-class": "patient"})
        assert counts(client) == {("patient", "failed"): 1}
    nowhere = {"url": "http://127.0.0.1:1"}
    async with up(nowhere, classes=CLASSES, queue={"maxRequests": 0}, seen=False) as client:
        status, _, _ = await client.ask(headers={"x-tidegate-class": "patient"})
        assert status in (429, 503)
        assert counts(client) == {("patient", "shed"): 1}


async def test_a_call_that_the_engine_rejects_is_the_clients_fault_and_does_not_count(up: Any) -> None:
    async with fake_engine.engine(status=400) as engine, up(engine, classes=CLASSES) as client:
        await client.ask(headers={"x-tidegate-class": "patient"})
        assert counts(client) == {}


async def test_alerts_read_objectives_the_age_of_the_queue_the_store_and_the_certificate(up: Any) -> None:
    classes = [{"name": "strict", "ttft": "1s", "objective": 99.5}]
    async with fake_engine.engine() as engine, up(engine, classes=classes) as client:
        async with client.http.get(f"{client.url}/metrics") as answer:
            text = await answer.text()
        shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert shown['tidegate_slo_objective_ratio{class="strict"}'] == "0.995"
        assert shown['tidegate_slo_objective_ratio{class="none"}'] == "0.95"
        assert shown["tidegate_store_up"] == "1.0"
        assert shown["tidegate_certificate_expiry_timestamp_seconds"] == "0.0"


async def test_no_series_tells_when_it_was_created(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine) as client:
        await client.ask()
        text = client.gateway.metrics.exposition()[0].decode()
        assert "tidegate_requests_total" in text
        assert "_created" not in text


async def test_names_that_clients_choose_take_a_bounded_number_of_labels(up: Any) -> None:
    names = [f"tenant-{number}" for number in range(3 * prometheus_metrics.MOST_LABELS)]
    async with fake_engine.engine(tokens=1) as engine, up(engine, classes=CLASSES) as client:
        for first in range(0, len(names), 50):
            asked = (
                client.ask(
                    headers={
                        "x-tidegate-class": "patient",
                        "x-tidegate-tenant": name,
                        "x-tidegate-workflow": f"w-{name}",
                        "x-tidegate-stage": f"stage-{name}",
                        "x-tidegate-deadline-ms": "600000",
                    }
                )
                for name in names[first : first + 50]
            )
            assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
        seen = counts(client, "tidegate_tenant_slo_calls")
        assert sum(seen.values()) == len(names)
        assert seen["other", "met"] == len(names) - prometheus_metrics.MOST_LABELS
        by_label: dict[tuple[str, str], set[str]] = {}
        for family in client.gateway.metrics.registry.collect():
            for sample in family.samples:
                for label, value in sample.labels.items():
                    by_label.setdefault((family.name, label), set()).add(value)
        most = max(by_label, key=lambda place: len(by_label[place]))
        assert len(by_label[most]) <= prometheus_metrics.MOST_LABELS + 1, most


async def test_no_metric_and_no_log_line_shows_a_key_a_prompt_or_an_answer(
    up: Any, caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path
) -> None:
    key, prompt, engine_says = "sk-canary-key-1", "canary prompt 2", "canary answer 3"
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys:\n- {{tenant: search, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}\n")
    caplog.set_level(logging.DEBUG)
    async with (
        fake_engine.engine(padding=engine_says) as engine,
        fake_engine.engine(garbage=engine_says.encode()) as bad,
        up(engine, bad, auth={"keysFile": str(keys)}) as client,
    ):
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"Bearer {key}-wrong"}):
            for stream in (False, True):
                body = {"model": "fake", "prompt": prompt, "stream": stream}
                async with client.http.post(client.url + "/v1/completions", json=body, headers=headers) as response:
                    await response.read()
        page = exposition.generate_latest(client.gateway.metrics.registry).decode()
        async with client.http.get(client.admin_url + "/admin/state") as response:
            page += await response.text()
    shown = page + caplog.text
    assert "search" in shown
    for secret in (key, prompt, engine_says):
        assert secret not in shown, secret


ERROR = b'data: {"error":{"message":"out of memory"}}\n\n'
"""What an engine sends that fails in the middle of a stream."""


@pytest.mark.parametrize("failure", [ERROR, b"data: no JSON\n\n", b"data: 5\n\n"])
async def test_an_engine_that_fails_in_mid_answer_has_failed_calls_over_grpc_too(
    up: Any, until: Any, failure: bytes
) -> None:
    token = b'data: {"choices":[{"text":"w"}]}\n\n'
    request = inference_pb2.GenerateRequest(model="fake", prompt="hi")
    async with (
        troubled_engines.endless(token, failure) as url,
        up({"url": url}, classes=CLASSES, listen={"grpcPort": 0}) as client,
        grpc.aio.insecure_channel(client.grpc) as channel,
    ):
        services, (engine,) = client.gateway.metrics.engines, client.accepting()
        services.counts = True
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.Generate(request, metadata=[("x-tidegate-class", "patient")]):
                pass
        await until(lambda: counts(client) == {("patient", "failed"): 1})
        outcomes = {"class": "patient", "outcome": "engine_failed"}
        assert client.gateway.metrics.registry.get_sample_value("tidegate_requests_total", outcomes) == 1
        assert services.of(engine).errors == 1


async def test_a_class_that_a_reload_removed_has_no_attainment_any_more(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, classes=CLASSES) as client:
        await client.ask(headers={"x-tidegate-class": "patient"})
        shown = client.gateway.metrics.registry.get_sample_value
        assert shown("tidegate_slo_attainment_ratio", {"class": "patient"}) == 1.0
        client.gateway.metrics.set_classes({"hasty": 95.0})
        assert shown("tidegate_slo_attainment_ratio", {"class": "patient"}) is None


def test_each_waiting_call_counts_in_a_lane_also_where_there_are_more_names_than_labels() -> None:
    metrics = prometheus_metrics.Metrics()
    for lanes in range(1, prometheus_metrics.MOST_LABELS + 20):
        metrics.on_lanes({f"lane {lanes}": lanes, "fast": 1})
        samples = next(iter(metrics.queue_lane_depth.collect())).samples
        assert sum(each.value for each in samples) == lanes + 1
