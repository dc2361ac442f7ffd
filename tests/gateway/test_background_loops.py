"""An exception in a background loop ends neither the loop nor the gateway."""

import asyncio
import collections
import hashlib
import json
import pathlib
import re
from typing import Any

import grpc_peer
import pytest
import relquery_requests
import test_port_encryption
import test_web_tokens

import fake_engine
from tidegate_gateway import settings_reload
from tidegate_gateway.edge import http2_connection, http2_server
from tidegate_gateway.observe import background_loop, prometheus_metrics


async def test_an_error_is_logged_once_for_each_kind_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    metrics = prometheus_metrics.Metrics()
    loops = background_loop.BackgroundLoops(metrics)
    errors: list[Exception] = [ValueError("one"), ValueError("two"), KeyError("three")]

    async def step() -> None:
        if errors:
            raise errors.pop(0)

    assert [await loops.step("exchange", step) for _ in range(4)] == [False, False, False, True]
    assert len(caplog.records) == 2
    counted = metrics.registry.get_sample_value("tidegate_background_errors_total", {"loop": "exchange"})
    assert counted == 3


async def test_a_loop_of_the_same_name_that_succeeds_does_not_have_an_error_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loops = background_loop.BackgroundLoops(prometheus_metrics.Metrics())

    async def fails() -> None:
        raise ValueError

    async def succeeds() -> None:
        pass

    for _ in range(3):
        await loops.step("health-check", fails, of="a:8000")
        await loops.step("health-check", succeeds, of="b:8000")
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "background loop health-check of a:8000 failed and goes on"
    ]


async def test_an_error_in_any_loop_of_a_gateway_ends_neither_it_nor_another(
    up: Any, until: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of each loop fails."""
    failed, ran = set[str](), collections.Counter[str]()
    step = background_loop.BackgroundLoops.step

    async def injected() -> None:
        raise ZeroDivisionError

    async def first_fails(self: background_loop.BackgroundLoops, loop: str, work: Any, *, of: str = "") -> bool:
        if loop not in failed:
            failed.add(loop)
            return await step(self, loop, injected, of=of)
        try:
            return await step(self, loop, work, of=of)
        finally:
            ran[loop] += 1

    monkeypatch.setattr(background_loop.BackgroundLoops, "step", first_fails)
    keys, key = tmp_path / "keys.yaml", "acme-0123456789abcdef"
    hashed = hashlib.sha256(key.encode()).hexdigest()
    keys.write_text(json.dumps({"keys": [{"sha256": hashed, "tenant": "acme"}]}))
    (tmp_path / "jwks.json").write_text(json.dumps(test_web_tokens.KEY_SET))
    auth = {
        "keysFile": str(keys),
        "reload": "100ms",
        "jwt": test_web_tokens.settings(tmp_path / "jwks.json", refresh="50ms"),
    }
    expected = {
        name
        for source in pathlib.Path(background_loop.__file__).parents[1].rglob("*.py")
        for name in re.findall(r'loops\.step\("([a-z-]+)"', source.read_text())
    }
    settings_path = tmp_path / "settings.yaml"
    async with fake_engine.engine() as engine:
        service = {"name": "localhost", "port": int(engine.url.rpartition(":")[2]), "controlPort": 1}
        tls = test_port_encryption.certificate(tmp_path)
        more: dict[str, Any] = {
            "health": {"resolve": "100ms"},
            "store_options": {"lease": "1s"},
            "tenants": [{"name": "acme", "tokensPerMinute": 1_000_000}],
            "dispatch": {"cap": 1},
            "listen": {"grpcPort": 0, "extProcPort": 0},
            "picker": {"healthPort": 0},
        }
        engine.token_s = 0.1
        async with up(services=[service], auth=auth, tls=tls, **more) as client:
            settings_path.write_text("{}")
            reloading = settings_reload.SettingsReload(settings_path, client.gateway)
            task = asyncio.create_task(reloading.run())
            headers = {"authorization": f"Bearer {key}"}
            trusting = test_port_encryption.trusting(tls)
            url = client.url.replace("http", "https")
            await until(client.all_accepting)
            body = relquery_requests.body(3)
            async with client.http.post(url + "/v1/relqueries", json=body, headers=headers, ssl=trusting) as answer:
                assert answer.status < 300, await answer.text()
                assert len(relquery_requests.of_rows(await relquery_requests.events(answer))) == 3

            async def ask() -> int:
                call = {"model": "fake", "prompt": "x"}
                async with client.http.post(
                    url + "/v1/completions", json=call, headers=headers, ssl=trusting
                ) as answer:
                    await answer.read()
                    return answer.status

            while (
                expected - failed or {"tick", "tenant-tokens"} - ran.keys()
            ):  # these need calls that wait or have ended
                assert await asyncio.gather(*(ask() for _ in range(3))) == [200] * 3
            await until(lambda: not expected - ran.keys())
            task.cancel()
    assert len(expected) > 10


async def test_a_connection_that_cannot_be_looked_at_is_counted_and_the_others_are_looked_at(
    up: Any, until: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, looked = set[http2_connection.Connection](), collections.Counter[http2_connection.Connection]()

    def look(self: http2_connection.Connection, now_s: float) -> None:
        looked[self] += 1
        broken.add(next(iter(looked)))
        if self in broken:
            raise ZeroDivisionError

    monkeypatch.setattr(http2_connection.Connection, "look", look)
    monkeypatch.setattr(http2_server, "LOOK_S", 0.01)
    async with up(store=False, listen={"grpcPort": 0}) as client:
        async with grpc_peer.connected(client.grpc) as first, grpc_peer.connected(client.grpc) as second:
            await first.read()
            await second.read()
            await until(lambda: len(looked) == 2 and min(looked.values()) > 5)
        count = client.gateway.metrics.registry.get_sample_value
        assert count("tidegate_background_errors_total", {"loop": "grpc-connections"}) >= 5
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_a_cancelled_step_is_cancelled() -> None:
    loops = background_loop.BackgroundLoops(prometheus_metrics.Metrics())
    step = asyncio.create_task(loops.step("exchange", lambda: asyncio.sleep(60)))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


@pytest.mark.parametrize("stream", [True, False])
async def test_an_absurd_usage_leaves_the_gateway_and_its_exchange_alive(up: Any, until: Any, stream: bool) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 150_000_000_000_000_000}
    event = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    garbage = json.dumps({**event, "usage": usage}).encode()
    if stream:
        last = json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()
        garbage = b"data: " + json.dumps(event).encode() + b"\n\ndata: " + last + b"\n\ndata: [DONE]\n\n"
    async with fake_engine.engine(garbage=garbage) as engine, up(engine) as client:
        body = {"model": "fake", "prompt": "x", "stream": stream}
        async with client.http.post(client.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()
        engine.garbage, engine.hang = None, True
        waiting = asyncio.create_task(client.ask("/v1/completions", prompt="x"))
        await until(lambda: engine.running == 1)
        assert engine.bodies[-1]["vllm_xargs"]["tg.out_pred"] <= 10_000_000
        async with up(engine, pool=client.gateway.settings.store.pool) as other:
            await until(lambda: any(known.facts.others.calls for known in other.gateway.core.engines))
        waiting.cancel()
        count = client.gateway.metrics.registry.get_sample_value
        assert count("tidegate_background_errors_total", {"loop": "exchange"}) is None
