"""Engines that answer rubbish, or streams without an end: the client gets a good answer or a clear error."""

import asyncio
from typing import Any

import pytest
from troubled_engines import endless, preferring, stream

import fake_engine


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"hello",
        b"\x00\xff",
        b'{"choices": 5}',
        b'{"choices": [null]}',
        b"[1,2]",
        b"data: hello\n\n",
        b"data: {\n\n",
        b"x: y\n\n" * 9,
        b"data: [DONE]\n\n",
        b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n',
        b'{"choices": []}',
        pytest.param(b"<html>" + 130_000 * b"[", id="a page with very many brackets"),
    ],
)
async def test_garbled_answers_count_as_failures(up: Any, garbage: bytes) -> None:
    async with (
        fake_engine.engine(garbage=garbage) as bad,
        fake_engine.engine() as good,
        up(*preferring(bad, good)) as client,
    ):
        status, answer, _ = await client.ask()
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        events = await stream(client)
        assert events[-1] == "[DONE]"
        assert len(bad.bodies) >= 1
        assert good.served == 2


async def test_comments_are_no_tokens(up: Any) -> None:
    token = b'data: {"choices":[{"text":"w"}]}\n\n'
    async with endless(token, b": still here\n\n") as url, up({"url": url}, timeouts={"nextToken": "300ms"}) as client:
        events = await stream(client)
        assert events[-2]["error"]["code"] == "engine_timeout"


@pytest.mark.parametrize("idle", [b":\n\n", b"\n\n"])
async def test_a_stream_of_nothing_but_comments_and_blank_lines_is_cut(up: Any, idle: bytes) -> None:
    token = b'data: {"choices":[{"text":"w"}]}\n\n'
    async with endless(token, 100 * idle) as url, up({"url": url}) as client:
        events = await stream(client)
        assert events[-2]["error"]["code"] == "engine_failed"


async def test_line_ends_of_both_kinds_may_mix_in_a_stream(up: Any) -> None:
    stream_ = b": ping\r\n\r\n" + b'data: {"choices":[{"text":"w"}]}\n\n' + b": ping\r\n\r\ndata: [DONE]\n\n"
    async with fake_engine.engine(garbage=stream_) as engine, up(engine) as client:
        body = {"model": "fake", "prompt": "x", "stream": True}
        async with client.http.post(client.url + "/v1/completions", json=body) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_ignores_the_bound_on_its_tokens_is_cut(up: Any) -> None:
    token = b'data: {"choices":[{"text":"w"}]}\n\n'
    async with endless(token, token) as url, up({"url": url}) as client:
        events = await stream(client, max_tokens=30)
        assert events[-2]["error"]["code"] == "engine_failed"
        assert 30 < len(events) < 200


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\x00\xff" * 1000,
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running 1e308\n" * 2,
        b"vllm:num_requests_waiting -7\n",
        b"{}" * 9999,
        b"a{\n" * 300_000,
        b"vllm:num_requests_running{\n" * 30_000,
        b"vllm:num_requests_running" * 40_000,
        b"vllm:num_requests_running " + b"9" * 1_000_000,
    ],
    ids=["empty", "binary", "nan", "huge", "negative", "braces", "open", "open labels", "names", "digits"],
)
async def test_rubbish_metrics_do_no_harm(up: Any, page: bytes) -> None:
    async with fake_engine.engine(metrics=page) as engine, up(engine) as client:
        assert (await client.ask())[0] == 200
        (shown,) = client.state()["engines"]
        assert (shown["running"], shown["waiting"], shown["kv_usage"]) == (None, None, None)


async def test_a_port_that_does_not_speak_http_is_no_engine(up: Any, until: Any) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x00\xffSSH-2.0-no\r\n\r\nHTTP/9.9 what\r\n\r\n" * 100)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    bad = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, fake_engine.engine() as engine, up({"url": bad}, engine, seen=False) as client:
        await until(lambda: all(known.checks for known in client.gateway.discovery.known.values()))
        for _ in range(3):
            assert (await client.ask())[0] == 200
        reasons = {shown["url"]: shown["reason"] for shown in client.state()["engines"]}
        assert reasons[bad].startswith("does not answer")


async def test_older_metric_names_are_read(up: Any, until: Any) -> None:
    page = b'# HELP x\nvllm:num_requests_running{model_name="m"} 3.0\nvllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
    async with fake_engine.engine(metrics=page) as engine, up(engine) as client:
        await until(lambda: client.state()["engines"][0]["running"] == 3)
        assert client.state()["engines"][0]["kv_usage"] == 0.25
