"""`tidegate profile estimate` prints a profile that every other part accepts, and says that nobody measured it."""

import json
import pathlib

import pytest
import yaml

import tidegate_profiles
from tidegate_cli import main
from tidegate_policy import cost

LLAMA = {
    "_name_or_path": "meta-llama/Llama-3.1-8B", "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
BY_HAND = ("--parameters", "8.03e9", "--layers", "32", "--hidden", "4096", "--kv-bytes", "131072")


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def estimate(*words: str) -> int:
    return main.main(["profile", "estimate", *words])


def test_the_estimate_is_a_profile_and_says_that_nobody_measured_it(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert estimate("--accelerator", "h100-sxm", "--tensor-parallel", "2", "--config", str(config)) == 0
    printed, told = capsys.readouterr()
    profile = tidegate_profiles.parse(printed, "estimated")
    assert set(profile) <= set(tidegate_profiles.FIELDS)
    assert (profile["model"], profile["accelerator"], profile["tensor_parallel"]) == (
        "meta-llama/Llama-3.1-8B",
        "NVIDIA-H100-80GB-HBM3",
        2,
    )
    assert "No measurement: a roofline from NVIDIA's datasheet of the H100 SXM." in profile["source"]
    assert "nobody measured" in tidegate_profiles.accuracy(profile)
    model = cost.from_mapping(profile["cost"])
    assert (model.max_batch, model.max_step_tokens) == (1024, 8192)
    assert model.kv_tokens > 900_000
    assert "Nobody has measured it." in told
    assert "from measured runs of 4 shipped profiles: step_s 0.85 to 1.60" in told


def test_the_numbers_may_be_given_by_hand(config: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--max-batch", "64", "--max-step-tokens", "4096")
    assert estimate("--accelerator", "NVIDIA-GeForce-RTX-4090", *BY_HAND, *limits, "--model", "mine") == 0
    by_hand = yaml.safe_load(capsys.readouterr().out)
    assert estimate("--accelerator", "rtx4090", "--config", str(config)) == 0
    by_config = yaml.safe_load(capsys.readouterr().out)
    assert (by_hand["model"], by_hand["cost"]["max_batch"], by_hand["cost"]["max_step_tokens"]) == ("mine", 64, 4096)
    assert by_hand["cost"]["step_s"] == pytest.approx(by_config["cost"]["step_s"], rel=1e-3)
    assert estimate("--accelerator", "rtx4090", *BY_HAND, "--weight-bytes", "1") == 0
    assert yaml.safe_load(capsys.readouterr().out)["cost"]["step_s"] < 0.6 * by_hand["cost"]["step_s"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(
            ("--accelerator", "tpu", *BY_HAND), 2, "no datasheet of 'tpu' is at hand; known are a100-40", id="card"
        ),
        pytest.param(("--accelerator", "h200"), 2, "give --config, or all numbers by hand", id="no model"),
        pytest.param(
            ("--accelerator", "h200", "--parameters", "7e9"), 2, "(layers, hidden, kv_bytes_a_token)", id="half"
        ),
        pytest.param(
            ("--accelerator", "h200", "--config", "nowhere.json"), 1, "cannot read nowhere.json", id="no file"
        ),
        pytest.param(
            ("--accelerator", "rtx4090", *BY_HAND, "--parameters", "7e10"), 1, "leave no room for KV", id="too large"
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert estimate(*words) == code
    printed, told = capsys.readouterr()
    assert printed == ""
    assert sentence in told
    assert len(told.strip().splitlines()) == 1


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000])
def test_a_file_that_is_no_configuration_is_a_sentence(
    content: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert estimate("--accelerator", "h200", "--config", str(path)) == 1
    assert str(path) in capsys.readouterr().err


def test_a_number_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("x", "-1", "nan", "0"):
        with pytest.raises(SystemExit, match="2"):
            estimate("--accelerator", "h200", f"--parameters={value}")
        assert "is no number above zero" in capsys.readouterr().err


def test_without_an_engine_and_an_estimate_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile"]) == 2
    assert "name an engine by --url, or estimate a profile" in capsys.readouterr().err
