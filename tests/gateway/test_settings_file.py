"""A problem of a settings file is named with its line, and all problems are named at once."""

import os
import pathlib
import socket
from collections.abc import Callable

import pytest

from tidegate_gateway import app, gateway_settings, settings_decoder, settings_file
from tidegate_gateway.callers import api_keys

WRONG = """\
classes:
- {name: chat, ttft: 1s}
- name: batch
  deadlin: 10m
queue:
  ttl: 60
tenants:
- {name: search, maxUrgency: 9}
"""


def problems(path: pathlib.Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(settings_decoder.BadSettings) as caught:
        gateway_settings.load(path, {})
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def test_every_problem_is_named_with_its_line_and_the_nearest_known_name(tmp_path: pathlib.Path) -> None:
    found = problems(tmp_path / "g.yaml", WRONG)
    assert len(found) == 2
    assert found[0].startswith("4: classes[1].deadlin is not a setting; did you mean deadline? known are")
    assert found[1] == "6: queue.ttl must be a duration: 60 has no unit; write 60ms or 60s"


def test_a_problem_of_meaning_is_named_with_the_line_of_its_entry(tmp_path: pathlib.Path) -> None:
    text = WRONG.replace("deadlin:", "deadline:").replace("60\n", "60s\n")
    assert problems(tmp_path / "g.yaml", text) == ["8: tenants[search].maxUrgency must be from 0 to 4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("queue: {ttl: 1s}\npolicy: {}\nqueue: {}\n", "3: queue occurs twice"),
        ("- 1\n", "1: the settings must be a mapping"),
        ("engines:\n- {name: a}\n", "2: engines[0].url is required"),
        ("store:\n  url: http://x\n", "2: store.url must start with"),
        ("a: [\n", "2: "),
        ("a: " + "[" * 20_000 + "]" * 20_000, "too many levels"),
        ("", "is empty"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: pathlib.Path, text: str, expected: str) -> None:
    assert expected in problems(tmp_path / "g.yaml", text)[0]


def test_the_store_of_the_place_counts_where_no_store_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("tenants: [{name: search, tokensPerMinute: 5}]\n")
    with pytest.raises(settings_decoder.BadSettings, match=r"tenants\[search\].tokensPerMinute needs a store"):
        gateway_settings.load(path, {})
    assert gateway_settings.load(path, {"TIDEGATE_STORE_URL": "redis://x"}).store.url == "redis://x"
    assert gateway_settings.load(path, {}, store_url="unix:///s").store.url == "unix:///s"
    assert (
        gateway_settings.load(path, {"TIDEGATE_STORE_URL": "redis://x"}, store_url="unix:///s").store.url == "redis://x"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n  tokensPerMinute: 0\n", "tenants[a].tokensPerMinute must be at least 1, or null for no limit"),
        ("\n  tokensPerMinute: -1\n", "tenants[a].tokensPerMinute must be at least 1, or null for no limit"),
    ],
)
def test_a_limit_that_lets_no_token_pass_is_a_problem(tmp_path: pathlib.Path, text: str, expected: str) -> None:
    found = problems(tmp_path / "g.yaml", f"store: {{url: 'redis://x'}}\ntenants:\n- name: a{text}")
    assert found == [f"4: {expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{url: 'http://h:1', cost: {step_s: 1}}", "3: engines[1].cost cannot be used: prefill_s is required"),
        ("{url: 'http://h:1', name: b, cost: {steps: 1}}", "3: engines[1].cost of b cannot be used: unknown field"),
        ("{url: 'http://h:1', name: a}", "3: engines[1] has the name a of engines[0]"),
        ("{url: 'http://h:0/', name: b}", "3: engines[1].url is that of engines[0] too"),
        ("{url: 'http://h:1/v1/'}", "3: engines[1].url 'http://h:1/v1/' is not an engine's address"),
        ("{url: 'http://h:99999'}", "3: engines[1].url 'http://h:99999' is not an address"),
    ],
)
def test_an_engine_that_the_gateway_cannot_use_is_a_problem(tmp_path: pathlib.Path, text: str, expected: str) -> None:
    (found,) = problems(tmp_path / "g.yaml", f"engines:\n- {{url: 'http://h:0', name: a}}\n- {text}\n")
    assert found.startswith(expected)


def test_two_ports_are_equal_only_where_their_addresses_overlap(tmp_path: pathlib.Path) -> None:
    text = "listen:\n  metricsPort: 8000\n  metricsHost: "
    assert problems(tmp_path / "g.yaml", f"{text}0.0.0.0\n") == [
        "2: listen.metricsPort and listen.port are both 8000, and a port serves one protocol: choose two numbers"
    ]
    (tmp_path / "g.yaml").write_text(f"{text}127.0.0.2\n")
    gateway_settings.load(tmp_path / "g.yaml", {})


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_named_file_that_is_none_is_refused_and_not_waited_for(
    tmp_path: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> None:
    make(tmp_path / "keys")
    with pytest.raises(settings_decoder.BadSettings, match="is no file"):
        settings_file.named(str(tmp_path / "keys"), "auth.keysFile")


def test_a_named_file_has_a_bound(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys"
    with path.open("wb") as file:
        file.truncate(settings_file.MOST_BYTES + 1)
    with pytest.raises(settings_decoder.BadSettings, match="are read at most"):
        settings_file.named(str(path), "auth.keysFile")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 50_000, "has more than 8 levels"),
        (b"keys: &a [*a]", "refers to a value"),
        (b"keys: !!python/name:os.system", "has the tag"),
        (b"keys: 2026-13-45", "is not YAML"),
        (b"keys: " + b"9" * 5000, "is not YAML"),
    ],
    ids=["deep", "alias", "tag", "date", "number"],
)
def test_keys_that_would_end_their_reader_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(settings_decoder.BadSettings, match=says):
        api_keys.parsed(raw)


def test_a_gateway_skips_settings_of_a_newer_operator(caplog: pytest.LogCaptureFixture) -> None:
    newer = {
        "skipUnknown": True,
        "surprise": {"a": [1]},
        "classes": [{"name": "a", "novel": 1}, {"name": "b", "ttft": "1s"}],
        "queue": {"ttl": "5s", "odd": None},
    }
    settings = gateway_settings.from_mapping(newer)
    assert ([each.name for each in settings.classes], settings.queue.ttl_s) == (["a", "b"], 5.0)
    assert "skips them: surprise, classes[0].novel, queue.odd" in caplog.text
    for wrong in ({**newer, "skipUnknown": False}, {**newer, "queue": {"ttl": 5}}, {**newer, "no setting": 1}):
        with pytest.raises(gateway_settings.BadSettings):
            gateway_settings.from_mapping(wrong)


@pytest.mark.parametrize("setting", ["port", "grpcPort", "adminPort", "metricsPort"])
async def test_a_port_in_use_is_named_with_its_setting(setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = {"port": 0, "grpcPort": 0, "adminPort": 0, "metricsHost": "127.0.0.1", "metricsPort": None}
        loaded = gateway_settings.from_mapping({"listen": listen | {setting: taken.getsockname()[1]}})
        with pytest.raises(OSError, match=rf"address already in use; choose another port by listen.{setting}"):
            async with app.serving(loaded):
                pass
