"""The gateway as the endpoint picker of a real Envoy: what engines and clients get."""

import asyncio
import contextlib
import gc
import hashlib
import io
import json
import pathlib
from typing import Any

import envoy_process
import pytest

import fake_engine
from tidegate_gateway.edge import ext_proc

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
BUFFERED: dict[str, Any] = {}
BOTH_WAYS = {"processing_mode": {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}}
ANSWER_TOO = {"processing_mode": BOTH_WAYS["processing_mode"] | {"response_body_mode": "FULL_DUPLEX_STREAMED"}}
MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(BUFFERED, id="buffered"),
        pytest.param(BOTH_WAYS, id="request streamed"),
        pytest.param(ANSWER_TOO, id="both streamed"),
    ],
)


async def ask(
    client: Any, url: str, *, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[int, bytes, dict[str, str]]:
    body = io.BytesIO(json.dumps({**CHAT, **fields}).encode())
    typed = {"content-type": "application/json", **(headers or {})}
    async with client.http.post(f"{url}/v1/chat/completions", data=body, headers=typed) as answer:
        return answer.status, await answer.read(), {name.lower(): value for name, value in answer.headers.items()}


def calls_by_outcome(client: Any, outcome: str) -> float:
    return sum(
        sample.value
        for metric in client.gateway.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "tidegate_requests_total" and sample.labels["outcome"] == outcome
    )


@MODES
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_passes_byte_by_byte(
    up: Any, until: Any, tmp_path: pathlib.Path, mode: dict[str, Any], stream: bool
) -> None:
    async with (
        fake_engine.engine(tokens=100) as engine,
        envoy_process.picking(up, tmp_path, engine, envoy_changes=mode) as (client, url),
    ):
        status, body, headers = await ask(client, url, stream=stream)
        _, same, _ = await ask(client, engine.url, stream=stream)
        assert (status, body) == (200, same)
        address = engine.url.removeprefix("http://")
        assert headers["x-tidegate-engine"] == headers["x-gateway-destination-endpoint-served"] == address
        assert headers["x-tidegate-queue-ms"].isdigit()
        await until(lambda: calls_by_outcome(client, "ok") == 1)
        assert not client.own_backlog()


@MODES
async def test_an_engine_gets_our_labels_and_no_header_of_the_client(
    up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]
) -> None:
    forged = {
        "x-gateway-destination-endpoint": "127.0.0.1:9",
        "x-vllm-priority": "-1000",
        "x-session-id": "s",
        "authorization": "Bearer secret",
        "cookie": "secret",
        "x-tidegate-tenant": "t",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, envoy_changes=mode) as (client, url),
    ):
        assert (await ask(client, url, headers=forged, priority=-1000, vllm_xargs={"tg.tenant": "x", "a": 1}))[0] == 200
        (body,), (headers,) = engine.bodies, engine.headers
        assert body["messages"] == CHAT["messages"]
        assert body["vllm_xargs"]["tg.tenant"] == "t"
        assert body["vllm_xargs"]["a"] == 1
        assert body["priority"] > 0
        assert headers["x-gateway-destination-endpoint"] == engine.url.removeprefix("http://")
        assert headers["traceparent"] == forged["traceparent"]
        assert headers["x-request-id"].startswith("tg-")
        assert not headers.keys() & {"x-vllm-priority", "x-session-id", "authorization", "cookie", "x-tidegate-tenant"}


async def test_a_forged_destination_chooses_no_engine(up: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine() as engine,
        fake_engine.engine() as other,
        up(engine, listen={"extProcPort": 0}) as client,
    ):
        config = envoy_process.configuration(client.ext_proc, [engine.url, other.url], failure_mode_allow=False)
        async with envoy_process.envoy(tmp_path, config) as url:
            for _ in range(5):
                forged = {"x-gateway-destination-endpoint": other.url.removeprefix("http://")}
                assert (await ask(client, url, headers=forged))[0] == 200
        assert (engine.served, other.served) == (5, 0)


async def test_a_large_body_reaches_the_engine_whole(up: Any, tmp_path: pathlib.Path) -> None:
    text = "".join(hashlib.sha256(b"%d" % i).hexdigest() for i in range(60_000))  # 3.7 MB
    for mode in (BUFFERED, BOTH_WAYS):
        async with (
            fake_engine.engine() as engine,
            envoy_process.picking(up, tmp_path, engine, envoy_changes=dict(mode)) as (client, url),
        ):
            assert (await ask(client, url, messages=[{"role": "user", "content": text}]))[0] == 200
            assert engine.bodies[0]["messages"][0]["content"] == text


async def test_a_shed_call_gets_the_answer_of_the_http_port(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    settings = {"dispatch": {"cap": 1}, "queue": {"maxRequests": 0}}
    async with (
        fake_engine.engine(first_s=30) as engine,
        envoy_process.picking(up, tmp_path, engine, **settings) as (client, url),
    ):
        first = asyncio.create_task(ask(client, url))
        await until(lambda: engine.running == 1)
        status, body, headers = await ask(client, url)
        same_status, same, same_headers = await client.ask()
        assert (status, json.loads(body)) == (same_status, same)
        assert status == 429
        for name in ("content-type", "retry-after", "x-tidegate-reason"):
            assert headers[name] == same_headers[name]
        first.cancel()
        await until(lambda: engine.running == 0)
        await until(lambda: client.gateway.placements.in_progress == 0)
        assert not client.own_backlog()


async def test_without_engines_a_call_gets_503(up: Any, tmp_path: pathlib.Path) -> None:
    async with envoy_process.picking(up, tmp_path) as (client, url):
        status, body, headers = await ask(client, url)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no-engines")
        assert int(headers["retry-after"]) >= 1


@MODES
async def test_a_call_waits_longer_than_the_time_limit_of_a_message(
    up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]
) -> None:
    changes = {"message_timeout": "0.3s", **mode}
    async with (
        fake_engine.engine(first_s=0.8) as engine,
        envoy_process.picking(up, tmp_path, engine, envoy_changes=changes, dispatch={"cap": 1}) as (client, url),
    ):
        answers = await asyncio.gather(*(ask(client, url) for _ in range(3)))
        assert [status for status, _, _ in answers] == [200, 200, 200]


async def test_hanging_up_while_waiting_leaves_the_queue(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine(first_s=30) as engine,
        envoy_process.picking(up, tmp_path, engine, dispatch={"cap": 1}) as (client, url),
    ):
        first = asyncio.create_task(ask(client, url))
        await until(lambda: engine.running == 1)
        second = asyncio.create_task(ask(client, url))
        await until(lambda: client.gateway.core.dispatcher.waiting == 1)
        second.cancel()
        await until(lambda: client.gateway.core.dispatcher.waiting == 0)
        assert len(engine.bodies) == 1
        first.cancel()
        await until(lambda: engine.running == 0)
        await until(lambda: client.gateway.placements.in_progress == 0)
        assert not client.own_backlog()


async def test_an_engine_is_busy_until_its_stream_ends(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine(tokens=20_000, token_s=0.01) as engine,
        envoy_process.picking(up, tmp_path, engine) as (client, url),
    ):
        body = {**CHAT, "stream": True}
        async with client.http.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert await answer.content.readline()
            assert client.gateway.core.dispatcher.inflight == 1
        await until(lambda: engine.running == 0)
        await until(lambda: client.gateway.core.dispatcher.inflight == 0)


async def test_workflows_pass_through_the_picker(up: Any, tmp_path: pathlib.Path) -> None:
    async with fake_engine.engine() as engine, envoy_process.picking(up, tmp_path, engine) as (client, url):
        flow = {"id": "w", "deadline_ms": 60_000, "stages": [{"name": "a"}]}
        async with client.http.post(f"{url}/v1/workflows", json=flow) as answer:
            assert answer.status == 201
        assert (await ask(client, url, headers={"x-tidegate-workflow": "w", "x-tidegate-stage": "a"}))[0] == 200
        assert engine.bodies[0]["vllm_xargs"]["tg.workflow"] == "w"
        async with client.http.post(f"{url}/v1/workflows/w/complete") as answer:
            assert answer.status == 200
            (stage,) = (await answer.json())["stages"]
            assert stage["calls_done"] == 1
        status, body, headers = await ask(client, url, headers={"x-tidegate-workflow": "w", "x-tidegate-stage": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (409, "workflow_ended")
        assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "data", "headers", "status", "code"),
    [
        ("/v1/chat/completions", b"{", {}, 400, "invalid_request"),
        ("/v1/chat/completions", b"[]", {}, 400, "invalid_request"),
        ("/v1/chat/completions", b"", {}, 400, "invalid_request"),
        ("/v1/chat/completions", b"[" * 20_000, {}, 400, "invalid_request"),
        ("/v1/chat/completions", b"\xff\x00", {}, 400, "invalid_request"),
        ("/v1/chat/completions", b" " * 50_001, {}, 413, "body_too_large"),
        ("/v1/chat/completions", json.dumps({**CHAT, "model": "none"}).encode(), {}, 404, "model_not_found"),
        ("/v1/chat/completions", json.dumps(CHAT).encode(), {"x-tidegate-tenent": "t"}, 400, "invalid_request"),
        ("/v1/chat/completions", json.dumps(CHAT).encode(), {"content-encoding": "gzip"}, 400, "invalid_request"),
        ("/metrics", b"", {}, 404, "not_found"),
        ("/v1/models", b"{}", {}, 405, "method_not_allowed"),
    ],
)
async def test_bad_requests_get_the_errors_of_the_http_port(
    up: Any, tmp_path: pathlib.Path, path: str, data: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, limits={"bodyBytes": 50_000}) as (client, url),
    ):
        async with client.http.post(url + path, data=data, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
            assert answer.headers["content-type"] == "application/json"
        assert not engine.bodies
        assert (await ask(client, url))[0] == 200


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
async def test_an_envoy_that_sends_no_whole_bodies_is_told_so(up: Any, tmp_path: pathlib.Path, mode: str) -> None:
    changes = {"processing_mode": {"request_body_mode": mode}}
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, envoy_changes=changes) as (client, url),
    ):
        status, body, _ = await ask(client, url)
        assert (status, b"request_body_mode" in body, engine.bodies) == (500, True, [])


async def test_trailers_of_a_request_pass(up: Any, tmp_path: pathlib.Path) -> None:
    for mode in ("BUFFERED", "FULL_DUPLEX_STREAMED"):
        changes = {"processing_mode": {"request_body_mode": mode, "request_trailer_mode": "SEND"}}
        async with fake_engine.engine() as engine, up(engine, listen={"extProcPort": 0}) as client:
            config = envoy_process.configuration(client.ext_proc, [engine.url], failure_mode_allow=False, **changes)
            envoy_process.with_trailers(config)
            async with envoy_process.envoy(tmp_path, config) as url:
                host, port = url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                body = json.dumps(CHAT).encode()
                head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                writer.write(head + b"%x\r\n%s\r\n0\r\nx-end: yes\r\n\r\n" % (len(body), body))
                assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
                writer.close()
                await writer.wait_closed()
            assert engine.bodies[0]["messages"] == CHAT["messages"]


async def test_a_key_is_needed_and_stays_here(up: Any, tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = "secret-of-a-caller-0123456789"
    keys.write_text(f"keys: [{{sha256: {hashlib.sha256(key.encode()).hexdigest()}, tenant: shop}}]")
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, auth={"keysFile": str(keys)}) as (client, url),
    ):
        status, body, _ = await ask(client, url)
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        allowed = {"authorization": f"Bearer {key}"}
        assert (await ask(client, url, headers=allowed))[0] == 200
        assert engine.bodies[0]["vllm_xargs"]["tg.tenant"] == "shop"
        assert "authorization" not in engine.headers[0]


async def test_a_subset_of_the_proxy_is_kept(up: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine() as engine,
        fake_engine.engine() as other,
        up(engine, other, listen={"extProcPort": 0}) as client,
    ):
        for allowed, status in ((other.url.removeprefix("http://"), 200), ("10.1.1.1:8000", 503)):
            config = envoy_process.configuration(client.ext_proc, [engine.url, other.url], failure_mode_allow=False)
            envoy_process.subset_hint(config, [allowed])
            async with envoy_process.envoy(tmp_path, config) as url:
                for _ in range(4):
                    assert (await ask(client, url))[0] == status
        assert (engine.served, other.served) == (0, 4)


async def test_failures_of_an_engine_count_against_it(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine(status=500) as engine,
        fake_engine.engine() as other,
        envoy_process.picking(
            up,
            tmp_path,
            engine,
            other,
            dispatch={"rule": "round-robin"},
            health={"baseEjection": "600s", "maxEjection": "600s", "consecutiveFailures": 2},
        ) as (client, url),
    ):
        async with asyncio.timeout(60):
            while len(client.accepting()) == 2:
                status, body, _ = await ask(client, url)
                assert status == 200 or b"as set by the test" in body, "the engine's answer passes"
        assert client.accepting() == [other.url.removeprefix("http://")]
        assert (await ask(client, url))[0] == 200


@MODES
async def test_nothing_stays_of_requests_that_ended(
    up: Any, until: Any, tmp_path: pathlib.Path, mode: dict[str, Any]
) -> None:
    settings = {"dispatch": {"cap": 1}, "queue": {"maxRequests": 2}}
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, envoy_changes=mode, **settings) as (client, url),
    ):
        pickers = [each for each in gc.get_objects() if type(each) is ext_proc.Picker]
        (picker,) = [each for each in pickers if each.gateway is client.gateway]
        answers = await asyncio.gather(*(ask(client, url, stream=True) for _ in range(8)))
        assert {status for status, _, _ in answers} <= {200, 429}
        assert (await ask(client, url, messages=[]))[0] == 400
        engine.first_s = 3600
        asks = [asyncio.create_task(ask(client, url)) for _ in range(2)]
        await until(lambda: len(picker.exchanges) == 2)
        for each in asks:
            each.cancel()
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head + b"{" * 500)  # half of a body
        await writer.drain()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await until(lambda: not picker.exchanges)
        await until(lambda: client.gateway.placements.in_progress == 0)
        assert client.gateway.bodies.used == 0
        assert not client.own_backlog()
