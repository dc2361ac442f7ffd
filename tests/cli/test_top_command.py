"""`tidegate top` shows the state in a terminal, once without one, and as JSON."""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import pty
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import yaml

import fake_engine
from tidegate_cli import main, processes, terminal_text, top_view
from tidegate_gateway import app, gateway_settings

HOSTILE = "evil\x1b[2Jname"


@contextlib.asynccontextmanager
async def gateway(**document: Any) -> AsyncIterator[str]:
    """The address of a gateway that has answered one call."""
    async with fake_engine.engine() as engine:
        listen = {"port": 0, "adminPort": None, "grpcPort": None}
        settings = {"listen": listen, "engines": [{"name": "one", "url": engine.url}], "health": {"interval": "50ms"}}
        async with app.serving(gateway_settings.from_mapping(settings | document)) as bound:
            async with asyncio.timeout(10):
                while not bound.gateway.core.engines.accepting(bound.gateway.clock()):
                    await asyncio.sleep(0.01)
            body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
            headers = {"x-tidegate-deadline-ms": "60000", "authorization": "Bearer all-0123456789"}
            url = f"http://{bound.http}/v1/chat/completions"
            async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200
            await bound.gateway.policy.choose("override", "edf", reason="because", for_s=60)
            yield f"http://{bound.http}"


async def tidegate(*words: str) -> int:
    return await asyncio.to_thread(main.main, ["top", *words])


async def test_without_a_terminal_the_state_is_printed_once_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    async with gateway() as url:
        assert await tidegate("--url", url) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for part in (
        "1 of 1 engines serve",
        "POLICY edf (override",
        "urgency -> edf  because",
        "ENGINE",
        "QUEUE",
        "TENANT",
    ):
        assert part in text
    assert re.search(r"^none +100% +95% +1 +0 +0 +0 ", text, re.MULTILINE), "the call had a target and met it"


async def test_json_is_the_state_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    async with gateway() as url:
        assert await tidegate("--json", "--url", url.removeprefix("http://")) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["policy"]["name"], [engine["name"] for engine in state["engines"]]) == ("edf", ["one"])


async def test_a_gateway_with_keys_needs_one_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"all-0123456789").hexdigest()
    path.write_text(yaml.safe_dump({"keys": [{"sha256": digest, "tenant": "*"}]}))
    async with gateway(auth={"keysFile": str(path)}) as url:
        assert await tidegate("--url", url) == 1
        assert "set TIDEGATE_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("TIDEGATE_API_KEY", "all-0123456789")
        assert await tidegate("--url", url) == 0
        assert "ENGINE" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://", "x:y"])
def test_an_address_without_a_gateway_gives_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--url", url]) == 1
    assert "give its address with --url" in capsys.readouterr().err


async def test_a_port_of_another_protocol_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes.fromhex("000006040000000000000500100000"))  # the first frame of HTTP/2
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert await tidegate("--url", f"127.0.0.1:{server.sockets[0].getsockname()[1]}") == 1
        server.close()
    told = capsys.readouterr().err
    assert "does not speak HTTP/1.1; give the gateway's HTTP port" in told
    assert "\\x" not in told


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP])
async def test_in_a_terminal_the_state_is_drawn_again_and_the_screen_comes_back(end: signal.Signals) -> None:
    """The terminal is a pseudo terminal, as over SSH."""
    async with gateway() as url:
        ours, theirs = pty.openpty()
        command = processes.ourselves("top", "--url", url, "--interval", "0.2")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm"},
            start_new_session=True,
        )
        os.close(theirs)

        def until(drawn: int) -> bytes:
            seen = b""
            with contextlib.suppress(OSError):  # the program has ended
                while seen.count(b"ENGINE") < drawn:
                    seen += os.read(ours, 65536)
            return seen

        seen = await asyncio.wait_for(asyncio.to_thread(until, 3), 60)
        assert seen.count(b"POLICY") >= 3
        assert b"\x1b[?1049h" in seen
        process.send_signal(end)
        left = await asyncio.wait_for(asyncio.to_thread(until, 1000), 60)
        assert left.rstrip().endswith(b"\x1b[?1049l")
        assert await asyncio.wait_for(process.wait(), 60) == 0
        os.close(ours)


def state(engines: int = 1) -> dict[str, Any]:
    seen = {"answered": 3, "tokens": 9, "with_target": 3, "met": 2, "late": 1, "shed": 0, "failed": 0}
    lately = seen | {"met_ratio": 0.6667, "answer_s": 1.5}
    engine = {"node_pool": "pool", "accepting": True, "reason": None, "policy": "edf", "calls": 1, "calls_of_others": 0}
    engine |= {"cap": 8, "running": 1, "waiting": 0, "lanes": {HOSTILE: 1}, "kv_usage": 0.5, "backlog_s": 1.0}
    return {
        "scope": {"tenant": None},
        "at": "2026-01-01T00:00:00.000Z",
        "status": "ready",
        "reasons": [],
        "model": HOSTILE,
        "policy": {"name": "edf", "source": "override", "reason": HOSTILE, "left_s": 5, "since_s": 1, "switches": []},
        "calls": {"waiting": 0, "out": 1},
        "queue": {"lanes": {HOSTILE: 2}, "held": 1},
        "objective": 0.95,
        "classes": [
            {
                "name": HOSTILE,
                "waiting": 1,
                "lately": lately,
                "since_start": lately,
                "objective": 0.95,
                "budget_left": -5.6,
            }
        ],
        "throughput": {"step_s": 5, "answered": [0, 3], "tokens": [0, 9], "missed": [0, 1]},
        "tenants": [{"name": HOSTILE, "waiting": 1, "share": 1.0, "lately": lately}],
        "engines": [engine | {"name": f"{HOSTILE}-{index}", "backlog_s": float(index)} for index in range(engines)],
        "workflows": {"active": 0, "waiting": 0, "limit": None, "newest": []},
        "recent": [],
    }


def test_names_cannot_send_escapes_to_the_terminal() -> None:
    lines = top_view.lines(state(), terminal_text.Painter(colours=False), width=200)
    assert "evil?[2Jname" in "\n".join(lines)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 60)])
def test_a_hundred_engines_fit_the_terminal_and_the_busiest_come_first(width: int, height: int) -> None:
    lines = top_view.lines(state(engines=100), terminal_text.Painter(colours=True), width=width, height=height)
    assert max(map(terminal_text.length, lines)) <= width
    text = "\n".join(lines)
    assert text.index("name-99") < text.index("name-98")
    assert re.search(r"and \d\d engines with less work: \d\d in pool", text)
    assert len(lines) <= max(height, 30)


def test_a_tenant_sees_its_own_part() -> None:
    own = state() | {"scope": {"tenant": "acme"}, "policy": {"name": "edf"}}
    for missing in ("engines", "classes", "queue", "throughput", "calls"):
        del own[missing]
    assert "policy edf" in "\n".join(top_view.lines(own, terminal_text.Painter(colours=False), width=100))
