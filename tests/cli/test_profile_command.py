"""`tidegate profile` measures an engine through real sockets. The engine is simulated, so its true profile is known."""

import pathlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import yaml

import tidegate_profiles
from tidegate_cli import processes, profile_measurement
from tidegate_policy import cost

SECONDS = 120


@pytest.fixture(scope="module")
def engine(sim_engine: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with sim_engine("--speed", "2", "--profile", "a100-qwen1.5-4b") as url:
        yield url


def profile(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(processes.ourselves("profile", *words), capture_output=True, text=True, timeout=SECONDS)


def test_a_measured_profile_can_be_used_and_states_its_error(engine: str, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "new"
    done = profile("--url", f"{engine}/v1", "--max-batch", "8", "--max-step-tokens", "2048", "--out", str(out))
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    loaded = tidegate_profiles.read(path)
    model = cost.from_mapping(loaded["cost"])
    assert (model.max_batch, model.max_step_tokens) == (8, 2048)
    assert loaded["fit"]["held_out_timings"] >= 3
    assert "measured by `tidegate profile`" in loaded["source"]
    assert f"mean {loaded['fit']['mean_error']:.1%}" in done.stdout
    assert "decodes at 64 tokens" in done.stderr
    assert yaml.safe_load(path.read_text()) == loaded


def test_an_address_without_an_engine_is_one_sentence(tmp_path: pathlib.Path) -> None:
    done = profile("--url", f"http://127.0.0.1:{processes.free_port()}", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("tidegate profile: no engine answers at")
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_kv_capacity_is_read_from_vllms_metrics() -> None:
    line = 'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="185"} 1.0'
    assert profile_measurement.kv_tokens(f"# HELP x\n{line}\n") == 128 * 185
    assert profile_measurement.kv_tokens("") is None
    assert profile_measurement.kv_tokens('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0') is None
