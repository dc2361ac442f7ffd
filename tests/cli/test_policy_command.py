"""`tidegate policy` says what is in force, where, and where not."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import web

import fake_engine
from tidegate_cli import main, policy_command
from tidegate_gateway import app, gateway_settings
from tidegate_gateway.coordination import policy_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    admin: str
    http: str


@pytest.fixture
async def gateway() -> AsyncIterator[Addresses]:
    """One gateway without a store, over one engine without a control port."""
    async with fake_engine.engine() as engine:
        listen = {"port": 0, "adminPort": 0, "grpcPort": None}
        loaded = gateway_settings.from_mapping({"listen": listen, "engines": [{"name": "plain", "url": engine.url}]})
        async with app.serving(loaded) as bound:
            assert bound.admin is not None
            yield Addresses(admin=bound.admin, http=bound.http)


async def tidegate(*words: str) -> int:
    return await asyncio.to_thread(main.main, ["policy", *words])


async def test_set_names_the_engines_that_cannot_change_their_policy(
    gateway: Addresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await tidegate("--admin", f"http://{gateway.admin}", "set", "edf") == 0
    first, engine = capsys.readouterr().out.splitlines()
    assert first.startswith("edf  (override, 600 s left")
    assert engine == "  plain: has no control port; its own policy stays"


async def test_options_may_follow_the_verb_and_the_duration_is_used(
    gateway: Addresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await tidegate("set", "edf", "--for", "2h", "--admin", gateway.admin, "--json") == 0
    assert 7000 < json.loads(capsys.readouterr().out)["left_s"] <= 7200
    assert await tidegate("--json", "get", "--admin", gateway.admin) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["name"], list(answer["engines"])) == ("edf", ["plain"])


async def test_get_prints_the_last_switches_with_evidence_and_effect_in_the_words_of_the_api(
    gateway: Addresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await tidegate("--admin", gateway.admin, "set", "sjf") == 0
    capsys.readouterr()
    assert await tidegate("--admin", gateway.admin, "get") == 0
    text = capsys.readouterr().out
    assert "urgency -> sjf  (override: set by hand)" in text
    assert await tidegate("--admin", gateway.admin, "--json", "get") == 0
    (switch,) = json.loads(capsys.readouterr().out)["switches"]
    assert switch["at"] in text
    assert re.search(rf"    evidence, \d+ s before:  ?{re.escape(switch['evidence'])}\n", text)
    assert re.search(rf"    effect, \d+ s after:  +{re.escape(switch['effect'].partition(' (first')[0])}", text)


def test_get_prints_the_alternatives_and_the_expected_effect_of_a_switch_if_the_gateway_tells_them() -> None:
    told = {
        "at": "2026-11-22T00:00:00Z",
        "from": "edf",
        "to": "sjf",
        "source": "steered",
        "reason": "overload",
        "evidence": "none",
        "effect": "none",
    }
    silent = "".join(policy_command.switch_lines([told]))
    assert "alternatives" not in silent
    assert "expected" not in silent
    text = "".join(
        policy_command.switch_lines(
            [{**told, "alternatives": ["two-lane", "edf"], "expected": "calls\x1b[2J wait less"}]
        )
    )
    assert "    alternatives:          two-lane, edf\n" in text
    assert "    expected:              calls" in text
    assert "\x1b" not in text


async def test_watch_prints_each_further_switch_until_ctrl_c(gateway: Addresses) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidegate_cli.main", "policy", "get", "--watch", "--admin", gateway.admin),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"urgency  (")
    assert await process.stdout.readline() == b"  plain: has no control port; its own policy stays\n"
    assert await tidegate("--admin", gateway.admin, "set", "sjf") == 0
    assert b"urgency -> sjf  (override: set by hand)" in await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130


async def test_the_end_of_an_override_is_awaited_and_has_no_duration(
    gateway: Addresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await tidegate("--admin", gateway.admin, "set", "sjf") == 0
    assert await tidegate("--admin", gateway.admin, "set", "auto") == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("urgency  (settings")
    assert policy_command.LONGEST_S == policy_choice.LONGEST_OVERRIDE_S
    for words, said in (
        (("auto", "--for", "5m"), "--for is the duration of an override; auto ends one"),
        (("edf", "--for", "169h"), "--for must be more than 0 and at most 168h"),
    ):
        assert await tidegate("--admin", gateway.admin, "set", *words) == 2
        assert said in capsys.readouterr().err


async def test_get_and_watch_send_the_token_of_the_pool() -> None:
    tokens: list[str | None] = []
    switch = {"at": "2026-11-22T00:00:00Z", "from": "edf", "to": "sjf", "source": "steered", "reason": "overload"}
    switch |= {"evidence": "10% of 9 targets met", "effect": "nothing (first 1 s)"}

    async def admin(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization"))
        policy = {"name": "edf", "source": "steered", "reason": "", "switches": [switch] if len(tokens) > 1 else []}
        if len(tokens) > 3:
            switch["effect"] = "90% of 9 targets met"
        return web.json_response({**policy, "policy": policy, "engines": []})

    server = web.Application()
    server.router.add_get("/{path:.*}", admin)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidegate_cli.main", "policy", "get", "--watch"),
        *("--admin", f"127.0.0.1:{runner.addresses[0][1]}"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TIDEGATE_POOL_TOKEN": "a-token-of-the-pool"},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"edf  (steered)\n"
    assert b"edf -> sjf  (steered: overload)" in await process.stdout.readline()
    assert await process.stdout.readline() == b"    evidence, 60 s before: 10% of 9 targets met\n"
    effect = b"  2026-11-22T00:00:00Z  sjf: effect, 60 s after: 90% of 9 targets met\n"
    assert await process.stdout.readline() == effect
    process.terminate()
    await process.wait()
    await runner.cleanup()
    assert set(tokens) == {"Bearer a-token-of-the-pool"}


async def test_the_error_for_the_client_port_mentions_the_admin_port(
    gateway: Addresses, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("get",), ("set", "edf")):
        assert await tidegate(*words, "--admin", gateway.http) == 1
        error = capsys.readouterr().err
        assert f"no gateway's admin API answers at http://{gateway.http}" in error
        assert "give the admin address with --admin" in error


async def test_the_error_for_a_port_of_grpc_has_none_of_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    async def settings_frame(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\4\0\0\0\0\0")
        writer.close()

    async with await asyncio.start_server(settings_frame, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert await tidegate("get", "--admin", f"{host}:{port}") == 1
    error = capsys.readouterr().err
    assert "(what answers there is no HTTP/1.1 server)" in error
    assert "\\x" not in error


def test_an_unknown_policy_has_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["policy", "set", "edff"]) == 2
    assert "unknown policy 'edff'; did you mean edf? known are augmented, auto, " in capsys.readouterr().err


@pytest.mark.parametrize("admin", ["http://127.0.0.1:1", "http://", "http://[::1", "x:y"])
def test_an_address_without_a_gateway_gives_one_sentence(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["policy", "get", "--admin", admin]) == 1
    assert "give the admin address with --admin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({"policy": "edf"}, "in force", id="taken"),
        pytest.param({"policy": "sjf"}, "still sjf", id="not yet"),
        pytest.param({"policy": None}, "its control port does not answer", id="silent"),
        pytest.param(
            {"policy": "edf", "reason": "does not answer within 3 s"},
            "does not answer within 3 s; its policy was edf",
            id="stopped",
        ),
        pytest.param({"policy": "fcfs", "fallback": "no hook"}, "keeps vLLM's own scheduler: no hook", id="fallback"),
        pytest.param({"policy": "\x1b[31m"}, "still ?[31m", id="escapes as a policy"),
        pytest.param({"policy": "x\n", "reason": "\r"}, "?; its policy was x?", id="escapes as a reason"),
        pytest.param({"fallback": "\x1b[2J"}, "keeps vLLM's own scheduler: ?[2J", id="escapes as a fallback"),
        pytest.param({"control": None}, "has no control port; its own policy stays", id="no control"),
    ],
)
def test_the_state_of_the_policy_on_an_engine_is_one_phrase(fields: dict[str, object], said: str) -> None:
    engine = {"control": "127.0.0.1:1", "policy": None, "fallback": None, "reason": None, **fields}
    assert policy_command.standing(engine, "edf") == said
