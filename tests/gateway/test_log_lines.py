"""The log: a name cannot forge a line or a field, and a client that hangs up is no error."""

import asyncio
import contextlib
import json
import logging
import pathlib
import subprocess
import sys
from typing import Any

import aiohttp
import grpc
import pytest

import fake_engine
from tidegate_cli import processes
from tidegate_control import log_lines
from tidegate_gateway.observe import log_fields
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

FORGED = "x\n2026-01-01 00:00:00,000 ERROR tidegate.gateway: forged\r\x1b[2K\u2028y"


def written(message: str, *values: object, error: Exception | None = None) -> list[str]:
    """The lines of a record."""
    exc_info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("tidegate.gateway", logging.WARNING, "", 0, message, values, exc_info)
    return log_lines.Formatter().format(record).splitlines()


def test_a_reason_with_line_ends_stays_in_its_line() -> None:
    (line,) = written("policy %s -> %s (%s)", "fcfs", "edf", FORGED)
    assert "x\\x0a2026" in line
    assert line.isprintable()


def test_the_text_of_an_exception_cannot_begin_a_record() -> None:
    first, *more = written("background loop failed", error=ValueError(FORGED))
    assert first.endswith("background loop failed")
    assert more
    assert all(line.startswith(log_lines.MARK) and line.isprintable() for line in more)


def test_of_a_long_message_the_beginning_is_written_and_the_rest_is_counted() -> None:
    (line,) = written("the owner is %s", "x" * 200_000)
    shown, told = line.split("... (")
    assert len(shown) == log_lines.MOST_CHARACTERS
    assert "the owner is xxx" in shown
    more = int(told.removesuffix(" more characters)"))
    assert shown.count("x") + more == 200_000


def test_a_message_of_the_longest_length_is_whole() -> None:
    (line,) = written("%s", "x" * 3000)
    assert line.endswith(": " + "x" * 3000)


def test_escapes_count_towards_the_length_of_a_message_and_none_is_cut() -> None:
    for offset in range(6):
        (line,) = written("%s", "x" * offset + "\u2028" * 3999)
        shown, told = line.split("... (")
        assert log_lines.MOST_CHARACTERS - 6 < len(shown) <= log_lines.MOST_CHARACTERS
        assert shown.endswith("\\u2028")
        assert shown.count("\\u2028") + int(told.removesuffix(" more characters)")) == 3999


def test_a_long_traceback_is_shortened_in_its_middle() -> None:
    for text in ("y" * 200_000, "y\n" * 100_000):
        first, *more = written("background loop failed", error=ValueError(text + "the end"))
        assert first.endswith("background loop failed")
        assert sum(map(len, more)) < 4 * log_lines.MOST_OF_TRACEBACK
        assert max(map(len, more)) < log_lines.MOST_CHARACTERS + 100
        assert more[0].startswith(log_lines.MARK + "ValueError: y")
        assert any(line.endswith(" more characters)") for line in more)
        assert all(line.startswith(log_lines.MARK) for line in more)


def test_a_name_cannot_forge_a_field() -> None:
    line = log_fields.named({"tenant": 'a outcome=ok "', "class": "batch", "stage": None, "engine": "10.0.0.1:8000"})
    assert line == ' tenant="a outcome=ok \\"" class=batch engine=10.0.0.1:8000'


async def test_the_line_of_a_call_quotes_its_names(up: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidegate.gateway")
    async with fake_engine.engine() as engine, up(engine, store=False) as client:
        await client.ask(headers={"x-tidegate-tenant": "acme outcome=ok"})
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("call ")]
    assert ' tenant="acme outcome=ok" ' in line


MANY_LINES = """
import logging
from tidegate_control import log_lines
log_lines.configure("INFO")
for number in range(100_000):
    logging.getLogger("tidegate.gateway").info("line %d", number)
print("ended", flush=True)
"""


def test_a_log_that_nobody_reads_stops_nothing_and_what_is_lost_is_counted() -> None:
    program = [sys.executable, "-c", MANY_LINES]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ended\n", "nothing has read stderr so far"
        lines = process.stderr.read().decode().splitlines()
    assert process.returncode == 0
    numbers = [int(line.rpartition(" ")[2]) for line in lines if "tidegate.gateway: line" in line]
    assert numbers == list(range(len(numbers))), "the first lines, in their order"
    assert len(numbers) > 1000
    (lost,) = [int(line.split()[0]) for line in lines if line.endswith("because nothing read them")]
    assert len(numbers) + lost == 100_000


def test_a_log_without_a_reader_is_no_trouble() -> None:
    program = [sys.executable, "-c", MANY_LINES]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdout.readline() == b"ended\n"
    assert process.returncode == 0


PIPE_BYTES = 65536


async def test_a_gateway_whose_log_nobody_reads_answers_every_call(tmp_path: pathlib.Path, until: Any) -> None:
    """The lines of the calls are more than a pipe holds."""
    port, tenant = processes.free_port(), "t" * 120
    async with fake_engine.engine(tokens=1) as engine, aiohttp.ClientSession() as http:
        listen = {"port": port, "grpcPort": None, "adminPort": None}
        file = tmp_path / "gateway.json"
        file.write_text(json.dumps({"listen": listen, "engines": [{"url": engine.url}]}))
        words = ["-m", "tidegate_cli.main", "gateway", "--config", str(file), "--log-level", "info"]
        with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE) as process:  # noqa: ASYNC220
            try:

                async def status() -> int:
                    call = {"json": {"model": "fake", "prompt": "x"}, "headers": {"x-tidegate-tenant": tenant}}
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.post(f"http://127.0.0.1:{port}/v1/completions", **call) as answer:
                            await answer.read()
                            return answer.status
                    return 0

                async with asyncio.timeout(60):
                    while await status() != 200:
                        await asyncio.sleep(0.05)
                async with asyncio.timeout(120):
                    assert [await status() for _ in range(500)] == [200] * 500
            finally:
                process.kill()
            assert process.stderr is not None
            assert len(process.stderr.read()) > PIPE_BYTES - 4096, "the pipe was full"


async def test_a_client_that_hangs_up_is_no_error_in_the_log(
    up: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        fake_engine.engine(tokens=10_000, token_s=0.005) as engine,
        up(engine, store=False, listen={"grpcPort": 0}) as client,
    ):
        body = {"model": "fake", "prompt": "x", "stream": True}
        async with aiohttp.ClientSession() as http, http.post(client.url + "/v1/completions", json=body) as answer:
            await answer.content.readany()
        for read in (0, 1, 5):
            channel = grpc.aio.insecure_channel(client.grpc)
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(model="fake", prompt="x")
            )
            for _ in range(read):
                await call.read()
            await until(lambda: engine.running)
            if read == 5:
                await channel.close()
            else:
                call.cancel()
            await until(lambda: engine.running == 0)
            await channel.close()
        async with grpc.aio.insecure_channel(client.grpc) as channel:
            request = inference_pb2.GenerateRequest(model="fake", prompt="x")
            late = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=0.3)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await late.read():
                    pass
        await until(lambda: engine.running == 0)
        await asyncio.sleep(0.1)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info] == []
