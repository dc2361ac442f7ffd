"""The counters that alerts read: ended calls that had a target, by what became of the target."""

from typing import Any

from tidegate_gateway import fake_engine

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
