"""`tidegate config` explains a settings file, and the reference page is what the code says."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tidegate_cli import main, settings_reference
from tidegate_gateway import gateway_settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "pool.yaml"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_STORE_URL", "TIDEGATE_STORE_PASSWORD", "TIDEGATE_HOST", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def settings() -> list[settings_reference.Setting]:
    return [item for group in settings_reference.groups() for item in group.settings]


def test_the_reference_page_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_reference.page(), "run: tidegate config reference > docs/settings.md"


def test_every_setting_has_a_reason_and_every_number_a_unit() -> None:
    assert len(settings()) > 80
    assert not [item.path for item in settings() if not item.reason]
    assert not [item.path for item in settings() if "number" in item.type and not item.unit]
    assert not [group.path for group in settings_reference.groups() if "(" in group.summary.split(" ", maxsplit=1)[0]]


def test_the_examples_are_one_valid_document() -> None:
    loaded = gateway_settings.from_mapping(settings_reference.examples())
    assert loaded.workflows[0].stages[1].name == "link"


def test_every_named_place_in_a_serving_pool_exists() -> None:
    (crd,) = (ROOT / "crds").glob("*.yaml")
    (version,) = yaml.safe_load(crd.read_text())["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    absent = (settings_reference.OPERATOR, settings_reference.ABSENT)
    places = {item.serving_pool for item in settings()} - set(absent)
    assert places
    for place in places:
        node: Any = spec
        for step in place.split("."):
            node = node["properties"][step.removesuffix("[]")]
            node = node["items"] if step.endswith("[]") else node


def test_what_the_operator_renders_is_named_as_such() -> None:
    documents = yaml.safe_load_all((ROOT / "tests/operator/golden/chat.manifests.yaml").read_text())
    (text,) = (item["data"]["gateway.yaml"] for item in documents if "gateway.yaml" in item.get("data", {}))
    place = {item.path: item.serving_pool for item in settings()}
    rendered = set(paths(yaml.safe_load(text)))
    assert rendered <= set(place)
    assert not [path for path in rendered if place[path] == settings_reference.ABSENT]


def paths(value: Any, path: str = "") -> Iterator[str]:
    """The paths of the settings in a document."""
    if isinstance(value, dict) and not path.endswith(".cost"):
        for key, item in value.items():
            yield from paths(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from paths(item, f"{path}[]")
    else:
        yield path


def test_check_says_in_words_what_the_example_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "check", str(EXAMPLE)]) == 0
    told = capsys.readouterr().out
    assert "Class interactive: the first token within 1s, 60ms for each further token; weight 4; objective 95%." in told
    assert "Tenant evaluation: weight 1, 20,000 tokens a minute" in told
    assert "candidates (after link; 3 calls at a time)" in told
    assert "`tidegate up` starts one" in told
    assert "warning" not in told


def test_check_names_every_problem_with_its_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("classes:\n- {name: chat, tpot: 60}\nquue: {}\n")
    assert main.main(["config", "check", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{path}:2: classes[0].tpot must be a duration: 60 has no unit; write 60ms or 60s")
    assert lines[1].startswith(f"{path}:3: quue is not a setting; did you mean queue?")
    assert main.main(["config", "check", str(path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2


def test_check_warns_of_what_is_probably_not_meant(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("classes:\n- {name: chat, tpot: 60s}\n- {name: idle}\nlisten: {adminHost: 0.0.0.0}\n")
    assert main.main(["config", "check", str(path)]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.removeprefix(f"warning: {path}:").split(" ", maxsplit=2)[:2] for line in warnings] == [
        ["2:", "classes[chat].tpot"], ["3:", "classes[idle]"], ["4:", "listen.adminHost"],
    ]  # fmt: skip


def test_a_workflow_without_stages_and_calls_without_a_tenant_are_told_in_words(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("workflows: [{name: w, stages: []}, {name: v, deadline: 9s}]\ntenants: [{weight: 2}]\n")
    assert main.main(["config", "check", str(path)]) == 0
    told = capsys.readouterr().out
    assert "Workflow w: its calls name its stages.\n" in told
    assert "Workflow v: its calls name its stages, which end within 9s.\n" in told
    assert "Calls that name no tenant: weight 2, no token limit" in told


def test_an_unknown_profile_is_a_problem(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("engines:\n- url: http://127.0.0.1:1\n  profile: no-such-card\n")
    assert main.main(["config", "check", str(path)]) == 1
    assert f"{path}:3: engines[0].profile" in capsys.readouterr().err


def test_show_prints_a_file_with_the_same_settings(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = tmp_path / "every.yaml"
    examples = settings_reference.examples()
    auth = {name: value for name, value in examples["auth"].items() if name != "poolToken"}  # shown as "..."
    every.write_text(yaml.safe_dump({**examples, "auth": auth, "store": {"url": "redis://x"}}))
    assert main.main(["config", "show", "--config", str(every)]) == 0
    shown = capsys.readouterr().out
    assert gateway_settings.from_mapping(yaml.safe_load(shown)) == gateway_settings.load(every, {})


def test_show_marks_the_defaults_and_what_the_environment_sets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_STORE_URL", "redis://kept:6379/0")
    monkeypatch.setenv("TIDEGATE_STORE_PASSWORD", "a-secret-word")
    monkeypatch.setenv("TIDEGATE_POOL_TOKEN", "a-secret-word-of-the-pool")
    assert main.main(["config", "show", "--config", str(EXAMPLE)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  ttl: 30s" in lines
    assert "  port: 8000  # default" in lines
    assert "  url: redis://kept:6379/0  # from the environment" in lines
    assert not [line for line in lines if "a-secret-word" in line]


def test_the_gateway_refuses_a_wrong_file_with_all_its_problems(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("queue: {ttl: 60}\npolicy: {name: urgncy}\nunknown: 1\n")
    assert main.main(["gateway", "--config", str(path)]) == 2
    errors = capsys.readouterr().err
    assert f"{path}:1: queue.ttl" in errors
    assert f"{path}:3: unknown is not a setting" in errors


def test_a_file_of_keys_that_is_here_and_malformed_is_a_problem_and_an_absent_one_a_warning(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, keys = tmp_path / "g.yaml", tmp_path / "keys.yaml"
    path.write_text(f"auth: {{keysFile: {keys}}}\n")
    assert main.main(["config", "check", str(path)]) == 0
    assert f"auth.keysFile: cannot read {keys}: No such file" in capsys.readouterr().out
    keys.write_text("keys: [{sha256: short, tenant: a}]\n")
    assert main.main(["config", "check", str(path)]) == 1
    assert "keys[0].sha256 must be the SHA-256 of a key" in capsys.readouterr().err
    keys.write_text("keys: []\n")
    assert main.main(["config", "check", str(path)]) == 0
    assert f"auth.keysFile: {keys} has no keys" in capsys.readouterr().out


def test_a_certificate_that_is_here_and_malformed_is_a_problem_and_an_absent_one_a_warning(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, certificate = tmp_path / "g.yaml", tmp_path / "tls.pem"
    path.write_text(f"tls: {{certFile: {certificate}, keyFile: {certificate}}}\n")
    assert main.main(["config", "check", str(path)]) == 0
    assert "warning: " in capsys.readouterr().out
    certificate.write_text("no certificate\n")
    assert main.main(["config", "check", str(path)]) == 1
    assert "tls.certFile and tls.keyFile must be" in capsys.readouterr().err
