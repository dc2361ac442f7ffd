"""`tidegate picker`: its flags are those of the reference picker, and become settings of a gateway."""

import argparse
import pathlib
from collections.abc import Sequence

import pytest

from tidegate_cli import main, picker_command
from tidegate_gateway import gateway_settings
from tidegate_gateway.settings_decoder import BadSettings

OF_THE_SUITE = [
    "--pool-name", "primary-inference-pool", "--pool-namespace", "inference-conformance-app-backend", "--v", "4",
    "--zap-encoder", "json", "--grpc-port", "9002", "--grpc-health-port", "9003",
    "--config-file", "/config/conformance-plugins.yaml",
]  # fmt: skip
"""The arguments of a picker in base.yaml of the conformance suite."""


def settings(words: Sequence[str]) -> gateway_settings.Settings:
    parser = argparse.ArgumentParser()
    picker_command.add_arguments(parser)
    return picker_command.settings(parser.parse_args(words))


def test_the_arguments_of_the_suite_are_enough() -> None:
    made = settings(OF_THE_SUITE)
    assert made.inference_pool.shown == "inference-conformance-app-backend/primary-inference-pool"
    assert (made.listen.host, made.listen.ext_proc_port, made.listen.metrics_port) == ("::", 9002, 9090)
    assert (made.listen.grpc_port, made.listen.admin_port) == (None, None)
    assert (made.picker.health_port, made.picker.self_signed) == (9003, True)
    assert not made.picker.conformance_tests, "the suite is asked for by a flag of its own"
    assert settings([*OF_THE_SUITE, "--conformance-tests"]).picker.conformance_tests


def test_tls_can_be_chosen(tmp_path: pathlib.Path) -> None:
    name = ["--pool-name", "a"]
    assert not settings([*name, "--secure-serving=false"]).picker.self_signed
    assert settings([*name, "--secure-serving"]).picker.self_signed
    tls = settings([*name, "--cert-path", str(tmp_path)]).tls
    assert (tls.cert_file, tls.key_file) == (str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))


def test_a_file_has_further_settings_and_the_flags_come_first(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "listen: {extProcPort: 1, statusPage: false}\nauth: {keysFile: k}\ndispatch: {rule: round-robin}\n"
        "inferencePool: {name: other, apiUrl: 'https://x'}\npicker: {conformanceTests: true}\n"
    )
    made = settings(["--pool-name", "a", "--config", str(file)])
    assert (made.listen.ext_proc_port, made.listen.status_page) == (9002, False)
    assert (made.auth.keys_file, made.auth.allow_unauthenticated) == ("k", False)
    assert (made.inference_pool.name, made.inference_pool.api_url) == ("a", "https://x")
    assert made.dispatch.rule == "round-robin"
    assert made.picker.conformance_tests


@pytest.mark.parametrize("words", [["--pool-name", "Not A Name"], ["--pool-name", "a", "--grpc-port", "70000"]])
def test_wrong_flags_are_named(words: list[str]) -> None:
    with pytest.raises(BadSettings):
        settings(words)


def test_outside_a_cluster_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main.main(["picker", "--pool-name", "a"]) == 2
    assert "inferencePool.apiUrl is required outside a cluster" in capsys.readouterr().err
    assert main.main([*("picker", "--pool-name", "a", "--v", "4"), "--enable-pprof=false", "--tracing"]) == 2
    assert "--v, --tracing, --enable-pprof of the reference picker: no effect here" in capsys.readouterr().err
