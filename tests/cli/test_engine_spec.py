"""What `--engines` means."""

import pathlib

import pytest

from tidegate_cli import engine_spec
from tidegate_cli.command_errors import Usage
from tidegate_sim import pools


def test_simulated_engines_have_short_names_with_numbers_when_repeated() -> None:
    parsed = engine_spec.parse("sim:a100,a100,a6000", speed=1.0)
    assert [engine.name for engine in parsed] == ["a100-0", "a100-1", "a6000"]


@pytest.mark.parametrize("ending", ["yaml", "yml"])
def test_a_simulated_engine_takes_the_file_of_a_profile(tmp_path: pathlib.Path, ending: str) -> None:
    path = tmp_path / f"card.{ending}"
    path.write_text("cost: {step_s: 0.01, prefill_s: 0.0001}\n")
    (engine,) = engine_spec.parse(f"sim:{path}", speed=1.0)
    assert isinstance(engine, engine_spec.Simulated)
    assert (engine.name, engine.profile, engine.cost.step_s) == ("card", str(path), 0.01)
    assert [str(name) for name in pools.pool(f"{path},l40-70b-tp8")] == ["1-card", "2-l40-70b-tp8"]


def test_a_file_of_a_profile_with_another_ending_or_without_costs_is_a_usage_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "card.txt"
    path.write_text("cost: {}\n")
    with pytest.raises(Usage, match=r"must end in \.yaml or \.yml"):
        engine_spec.parse(f"sim:{path}", speed=1.0)
    path.rename(tmp_path / "card.yaml")
    with pytest.raises(Usage, match="cannot be used: step_s is required"):
        engine_spec.parse(f"sim:{tmp_path / 'card.yaml'}", speed=1.0)
    with pytest.raises(Usage, match="cannot read the profile"):
        engine_spec.parse(f"sim:{tmp_path / 'nosuch.yaml'}", speed=1.0)


def test_speed_makes_a_simulated_engine_faster() -> None:
    (slow,) = engine_spec.parse("sim:a100", speed=1.0)
    (fast,) = engine_spec.parse("sim:a100", speed=10.0)
    assert isinstance(slow, engine_spec.Simulated)
    assert isinstance(fast, engine_spec.Simulated)
    assert fast.cost.step_s == pytest.approx(slow.cost.step_s / 10)


def test_the_number_of_vllm_engines_is_optional() -> None:
    assert [engine.name for engine in engine_spec.parse("vllm", speed=1.0)] == ["vllm"]
    assert [engine.name for engine in engine_spec.parse("vllm:2", speed=1.0)] == ["vllm-0", "vllm-1"]


def test_urls_name_running_engines() -> None:
    parsed = engine_spec.parse("http://127.0.0.1:8100/,http://127.0.0.1:8101", speed=1.0)
    assert [engine.url for engine in parsed if isinstance(engine, engine_spec.Running)] == [
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8101",
    ]


@pytest.mark.parametrize(("count", "cores", "threads"), [(1, 8, "8"), (3, 8, "2"), (2, 1, "1")])
def test_real_engines_share_the_cores(count: int, cores: int, threads: str) -> None:
    environment = engine_spec.vllm_environment(count, cores=cores, given={})
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_environment_variables_of_the_user_stay() -> None:
    given = {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "0-2"}
    assert not given.keys() & engine_spec.vllm_environment(2, cores=8, given=given).keys()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("gpu", "is not one of sim:PROFILE", id="unknown kind"),
        pytest.param("sim:h900", "short names are a100, a6000, l40", id="unknown profile"),
        pytest.param("vllm:0", "names 0 engines", id="none"),
        pytest.param("vllm:99", "names 99 engines", id="too many"),
        pytest.param("http://", "is not an engine's address", id="no host"),
        pytest.param("http://host:99999", "is not an address", id="no port"),
        pytest.param("http://h:1,http://h:1/", "names h:1 2 times", id="twice"),
        pytest.param("http://h,http://H:80", "names h:80 2 times", id="twice, once with its port"),
        pytest.param("http://host:1/v1", "is not an engine's address", id="with a path"),
    ],
)
def test_an_invalid_engine_spec_is_a_usage_error(text: str, sentence: str) -> None:
    with pytest.raises(Usage, match=sentence):
        engine_spec.parse(text, speed=1.0)
