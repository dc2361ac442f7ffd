"""Each wrong request gets its documented status and a sentence that says what to do; nothing reaches the engine."""

import asyncio
import io
import time
from typing import Any

import aiohttp
import orjson
import pytest

import fake_engine

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(b"{", "not JSON", id="malformed"),
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"\xff\xfe", "not JSON", id="not text"),
        pytest.param(b"[1]", "JSON object", id="a list"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep nesting"),
        pytest.param(b"[" + b"[]," * 1_000_000 + b"[]]", "more than 120000 lists", id="a million lists"),
        pytest.param(b"{%s}" % b",".join(b'"%d" :1' % i for i in range(250_000)), "more than", id="many fields"),
        pytest.param(b"[%s]" % b",".join([b"1.5"] * 1_300_000), "more than 600000 values", id="many numbers"),
        pytest.param(
            b'{"model":"fake","messages":[%s]}' % b",".join([b'{"role":"u"}'] * 25_000), "at most 20000", id="messages"
        ),
        pytest.param(
            b'{"model":"fake","messages":[{"role":"u","content":[%s]}]}' % b",".join([b"{}"] * 25_000),
            "at most 20000 parts",
            id="parts",
        ),
        pytest.param(b'{"model": "fake", "messages": [], "x": NaN}', "not JSON", id="NaN"),
        pytest.param(b'{"messages": [{"role": "user", "content": "x"}]}', "model must be", id="no model"),
        pytest.param(b'{"model": 7, "messages": [{"role": "user"}]}', "model must be", id="model as number"),
        pytest.param(b'{"model": "fake"}', "messages must be", id="no messages"),
        pytest.param(b'{"model": "fake", "messages": "hi"}', "messages must be", id="messages as text"),
        pytest.param(b'{"model": "fake", "messages": ["hi"]}', "messages[0] must be", id="message as text"),
        pytest.param(b'{"model": "fake", "messages": [{"role": 1}]}', "messages[0] must be", id="role as number"),
        pytest.param(
            b'{"model":"fake","messages":[{"role":"u","content":5}]}', "content must be", id="content as number"
        ),
        pytest.param(
            b'{"model":"fake","messages":[{"role":"u"}],"stream":"yes"}', "stream must be", id="stream as text"
        ),
        pytest.param(b'{"model":"fake","messages":[{"role":"u"}],"n":1000000}', "n must be", id="absurd n"),
        pytest.param(
            b'{"model":"fake","messages":[{"role":"u"}],"max_tokens":-1}', "max_tokens must be", id="negative max"
        ),
        pytest.param(
            b'{"model":"fake","messages":[{"role":"u"}],"max_tokens":1.5}', "max_tokens must be", id="fraction"
        ),
        pytest.param(b'{"model":"fake","messages":[{"role":"u"}],"vllm_xargs":1}', "vllm_xargs must be", id="xargs"),
        pytest.param(b'{"model":"fake","messages":[{"role":"u"}],"stream_options":{}}', "stream: true", id="options"),
    ],
)
async def test_a_wrong_body_is_400(up: Any, raw: bytes, says: str) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, _ = await client.send("POST", CHAT, data=io.BytesIO(raw))
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert says in answer["error"]["message"]
        assert engine.bodies == []


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [""[:0], 5], {"a": 1}, [[]], [-1], [True], [[1]] * 30_000, [1] * 500_001]
)
async def test_a_wrong_prompt_is_400(up: Any, prompt: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        body = io.BytesIO(orjson.dumps({"model": "fake", "prompt": prompt}))
        status, answer, _ = await client.send("POST", "/v1/completions", data=body)
        assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_every_answer_has_a_request_id_the_clients_where_it_can_be(up: Any) -> None:
    async with up(store=False) as client:
        _, _, headers = await client.ask(headers={"x-request-id": "mine"}, n=-1)
        assert headers["x-request-id"] == "mine"
        for method, path in (("POST", CHAT), ("GET", "/nowhere"), ("GET", "/v1/models"), ("GET", "/ready")):
            for given in ({}, {"x-request-id": "x" * 257}):
                _, _, headers = await client.send(method, path, headers=given)
                assert headers["x-request-id"].startswith("tg-")
        _, _, headers = await client.send("GET", "/health", headers={"x-request-id": "mine"})
        assert headers["x-request-id"] == "mine"


async def test_an_unknown_class_is_400_and_names_the_known_where_the_settings_have_any(up: Any) -> None:
    async with fake_engine.engine() as engine:
        async with up(engine, store=False, classes=[{"name": "chat"}, {"name": "batch"}]) as client:
            assert (await client.ask(headers={"x-tidegate-class": "chat"}))[0] == 200
            status, answer, _ = await client.ask(headers={"x-tidegate-class": "chta"})
            assert (status, answer["error"]["param"]) == (400, "x-tidegate-class")
            assert "known are batch, chat" in answer["error"]["message"]
        async with up(engine, store=False) as client:
            assert (await client.ask(headers={"x-tidegate-class": "chta"}))[0] == 200


async def test_an_unknown_model_is_404_and_names_the_known(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, _ = await client.ask(model="gpt-17")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "fake" in answer["error"]["message"]


async def test_the_error_of_an_unknown_model_is_short_whatever_an_engine_lists(up: Any) -> None:
    names = tuple(f"adapter-{number}" for number in range(30))
    async with fake_engine.engine(adapters=("x" * 4096, *names)) as engine, up(engine, store=False) as client:
        status, answer, _ = await client.ask(model="gpt-17")
        assert status == 404
        assert "and 11 more" in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 1000
        _, listed, _ = await client.send("GET", "/v1/models")
        assert sorted(model["id"] for model in listed["data"]) == sorted(["fake", *names])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-tidegate-deadline-ms", "-5"),
        ("x-tidegate-deadline-ms", "0"),
        ("x-tidegate-deadline-ms", "99999999999999999999"),
        ("x-tidegate-deadline-ms", "soon"),
        ("x-tidegate-deadline-ms", "1e3"),
        ("x-tidegate-deadline-ms", "\u0663".encode().decode("latin-1")),
        ("x-slo-ttft-ms", "1.5"),
        ("x-tidegate-slo-tpot-ms", ""),
        ("x-tidegate-urgency", "5"),
        ("x-tidegate-urgency", "-1"),
        ("x-tidegate-tenant", "x" * 257),
        ("x-tidegate-workflow", "a b"),
        ("x-tidegate-workflow", "../../admin"),
        ("x-session-id", "\xe9"),
    ],
)
async def test_a_wrong_header_is_400_and_named(up: Any, name: str, value: str) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, _ = await client.ask(headers={name: value})
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"].startswith(name)
        assert engine.bodies == []


async def raw(client: Any, request: bytes, *, within_s: float = 10.0) -> bytes:
    """Sends bytes as they are; everything that comes back until the connection closes."""
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(within_s):
            return await reader.read()
    finally:
        writer.close()


async def test_a_header_of_ours_that_does_not_exist_is_400_and_the_nearest_is_named(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for name, near in (
            ("x-tidegate-deadline", "x-tidegate-deadline-ms"),
            ("X-Tidegate-Tenent", "x-tidegate-tenant"),
        ):
            status, answer, _ = await client.ask(headers={name: "5"})
            assert (status, answer["error"]["param"]) == (400, name.lower())
            assert answer["error"]["message"].endswith(f"the nearest is {near}")
        assert engine.bodies == []


async def test_a_workflow_without_a_store_says_what_to_set(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, headers = await client.send("POST", "/v1/workflows", json={"deadline_ms": 1000})
        assert (status, headers["x-tidegate-reason"]) == (503, "store-unavailable")
        assert "set store.url" in answer["error"]["message"]


async def test_an_unknown_class_is_other_in_metrics(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for number in range(3):
            assert (await client.ask(headers={"x-tidegate-class": f"c{number}"}))[0] == 200
        counted = client.gateway.metrics.registry.get_sample_value
        assert counted("tidegate_requests_total", {"outcome": "ok", "class": "other"}) == 3.0


@pytest.mark.parametrize("character", [b"\x00", b"\x01", b"\r", b"\x0b"])
async def test_control_characters_in_headers_are_400(up: Any, character: bytes) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-tidegate-tenant: a" + character + b"b\r\n\r\n"
        answer = await raw(client, request)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert b'{"error":{"message":"this is not a valid HTTP request' in answer
        assert engine.bodies == []


@pytest.mark.parametrize("name", ["x-tidegate-tenant", "X-Tidegate-Urgency", "idempotency-key"])
async def test_a_header_of_ours_with_two_different_values_is_400(up: Any, name: str) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for second, expected in (("3", 400), ("4", 200)):
            body, headers = {"model": "fake", "messages": HELLO}, [(name, "4"), (name, second)]
            status, answer, _ = await client.send("POST", CHAT, json=body, headers=headers)
            assert status == expected
            if expected == 400:
                assert answer["error"]["param"] == name.lower()
        assert len(engine.bodies) == 1


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"Content-Length: 5\r\nContent-Length: 6", id="two lengths"),
        pytest.param(b"Content-Length: 5\r\nTransfer-Encoding: chunked", id="length and chunks"),
    ],
)
async def test_ambiguous_heads_are_400(up: Any, head: bytes) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        answer = await raw(client, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\nhello")
        assert b" 400 " in answer.split(b"\r\n")[0]
        assert b'"invalid_request_error"' in answer
        assert engine.bodies == []


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        pytest.param(b"GET /%s HTTP/1.1\r\nHost: x" % (b"y" * 20_000), 414, "the path is longer", id="path"),
        pytest.param(b"GET / HTTP/1.1\r\nx: %s" % (b"y" * 20_000), 431, "shorter ones", id="a huge header"),
        pytest.param(
            b"\r\n".join([b"GET / HTTP/1.1", *(b"h%d: 1" % i for i in range(500))]),
            431,
            "send fewer",
            id="many headers",
        ),
        pytest.param(
            b"\r\n".join([b"GET / HTTP/1.1", *(b"h%d: %s" % (i, b"1" * 1000) for i in range(70))]),
            431,
            "32768 bytes in all",
            id="many long headers",
        ),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nHost: y", 400, "Two 'Host' headers", id="two hosts"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", 400, "speaks TLS", id="TLS"),
        pytest.param(b"hello", 400, "the method is malformed", id="no HTTP"),
        pytest.param(b"GET / HTTP/7.9\r\nHost: x", 400, "the first line must be", id="unknown version"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nno colon", 400, "Invalid header token", id="no header"),
        pytest.param(b"GET / HTTP/1.1\r\nx: y", 400, "Missing 'Host' header", id="no host"),
    ],
)
async def test_bytes_that_are_not_http_get_an_error_sentence(up: Any, request_: bytes, status: int, says: str) -> None:
    async with up(store=False) as client:
        head, _, body = (await raw(client, request_ + b"\r\n\r\n")).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert b"x-request-id: tg-" in head
        message = orjson.loads(body)["error"]["message"]
        assert says in message
        assert "\\" not in message, "nothing of the request is shown"
        assert "b'" not in message


async def test_a_body_over_the_limit_is_413(up: Any) -> None:
    limits = {"bodyBytes": 10_000}
    async with fake_engine.engine() as engine, up(engine, store=False, limits=limits) as client:
        status, answer, _ = await client.ask(user="x" * 20_000)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 1000

        status, answer, _ = await client.send("POST", CHAT, data=chunks())
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert (await client.ask())[0] == 200


async def test_the_bodies_of_all_requests_have_one_bound(up: Any, until: Any) -> None:
    limits = {"bodiesBytes": 75_000}
    async with fake_engine.engine(first_s=3600) as engine, up(engine, store=False, limits=limits) as client:
        first = asyncio.create_task(client.ask(user="x" * 40_000))
        await until(lambda: engine.running == 1)
        status, answer, _ = await client.ask(user="x" * 20_000)
        assert (status, answer["error"]["code"]) == (429, "saturated")
        engine.first_s = 0.0
        assert (await client.ask(user="x" * 5_000))[0] == 200
        first.cancel()
        await until(lambda: engine.running == 0)

        async def room() -> bool:
            return (await client.ask(user="x" * 40_000))[0] == 200

        for _ in range(3):
            await until(room)


async def test_slow_heads_and_bodies_are_given_up(up: Any) -> None:
    limits = {"body": "200ms", "idle": "300ms"}
    async with fake_engine.engine() as engine, up(engine, store=False, limits=limits) as client:
        started = time.monotonic()
        assert await raw(client, b"POST /v1/chat/completions HTTP/1.1\r\nHost:") == b""
        assert await raw(client, b"") == b""
        answer = await raw(client, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"request_timeout" in answer
        assert time.monotonic() - started < 8


async def test_a_compressed_body_is_a_bad_request(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        status, answer, _ = await client.send("POST", CHAT, data=b"xx", headers={"Content-Encoding": "gzip"})
        assert status == 400
        assert "compressed" in answer["error"]["message"]


async def test_no_engines_is_503_with_retry_after(up: Any) -> None:
    async with up(store=False) as client:
        status, answer, headers = await client.ask()
        assert (status, answer["error"]["code"]) == (503, "no-engines")
        assert int(headers["retry-after"]) >= 1
        assert headers["x-tidegate-reason"] == "no-engines"
        status, answer, _ = await client.send("GET", "/ready")
        assert (status, answer["status"]) == (503, "unready")
        assert (await client.send("GET", "/health"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/invocations", 404),
        ("POST", "/pause", 404),
        ("POST", "/v1/../pause", 404),
        ("POST", "//v1/chat/completions", 404),
        ("GET", "/admin/state", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/", 404),
    ],
)
async def test_only_listed_paths_exist(up: Any, method: str, path: str, status: int) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        request = f"{method} {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        answer = await raw(client, request.encode())
        assert int(answer.split()[1]) == status
        assert b'"error"' in answer


async def test_an_unknown_path_is_answered_with_the_known_ones(up: Any) -> None:
    async with up(store=False) as client:
        _, answer, _ = await client.send("POST", "/v1/images/generations", json={})
        assert answer["error"]["code"] == "not_found"
        for path in ("/v1/chat/completions", "/v1/workflows/{workflow}", "/v1/models/{model},", "/ready"):
            assert path in answer["error"]["message"]


async def test_head_is_get_without_the_body(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        for path, status in (("/v1/models", 200), ("/health", 200), ("/v1/nowhere", 404), (CHAT, 405)):
            request = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            head, _, body = (await raw(client, request.encode())).partition(b"\r\n\r\n")
            assert (int(head.split()[1]), body) == (status, b"")


async def test_an_idle_keepalive_connection_survives_an_error(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as one:
            async with one.post(client.url + CHAT, data=b"{") as response:
                assert response.status == 400
            async with one.post(client.url + CHAT, json={"model": "fake", "messages": HELLO}) as response:
                assert response.status == 200
