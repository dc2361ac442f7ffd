"""`tidegate picker`: a gateway that is only the endpoint picker of an InferencePool, with the reference picker's flags.

A Deployment of the reference picker (Gateway API Inference Extension, `lwepp`) runs it with another image and command and
the same arguments. It needs the same rights: to read InferencePools and pods of the namespace (docs/envoy.md).
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from tidegate_cli import gateway_command
from tidegate_cli.command_errors import Usage
from tidegate_gateway import gateway_settings, picker_settings, settings_decoder, settings_file
from tidegate_gateway.engines import inference_pool

NAMESPACE = pathlib.Path(picker_settings.ACCOUNT) / "namespace"
GROUP = inference_pool.GROUP.partition("/")[0]
EVERYWHERE = "::"
IGNORED = (
    "--v", "--zap-encoder", "--zap-log-level", "--config-file", "--config-text", "--tracing", "--health-checking",
    "--metrics-endpoint-auth", "--enable-pprof", "--ha-enable-leader-election",
)  # fmt: skip
"""Flags of the reference picker that its manifests and charts set: its logs, plugins and parts that this picker does not
have. It always has health checks, and all replicas serve."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pool-name", required=True, metavar="NAME", help="the InferencePool whose pods are the engines")
    add("--pool-namespace", metavar="NAME", help="its namespace (default: that of the picker's own pod)")
    add("--grpc-port", type=int, default=9002, metavar="PORT", help="port for the proxy (default: %(default)s)")
    add("--grpc-health-port", type=int, default=9003, metavar="PORT", help="port for probes (default: %(default)s)")
    add("--metrics-port", type=int, default=9090, metavar="PORT", help="port of /metrics (default: %(default)s)")
    add(
        "--secure-serving",
        nargs="?",
        const="true",
        default="true",
        choices=("true", "false"),
        help="TLS for the proxy, with a certificate made at the start unless --cert-path names one (default: %(default)s)",
    )
    add(
        "--cert-path",
        type=pathlib.Path,
        metavar="FOLDER",
        help="folder with the certificate tls.crt and its key tls.key",
    )
    add("--conformance-tests", action="store_true", help="for the conformance suite only: clients choose engines")
    add("--config", type=pathlib.Path, metavar="FILE", help="further settings of the gateway, YAML or JSON")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--pool-group", default=GROUP, choices=(GROUP,), help="API group of the InferencePool")
    for flag in IGNORED:
        add(flag, nargs="?", const="", metavar="VALUE", help="of the reference picker; ignored")


def run(options: argparse.Namespace) -> int:
    given = [flag for flag in IGNORED if getattr(options, flag[2:].replace("-", "_")) is not None]
    if given:
        sys.stderr.write(f"tidegate picker: {', '.join(given)} of the reference picker: no effect here\n")
    try:
        loaded = gateway_settings.from_environment(settings(options), os.environ)
    except settings_decoder.BadSettings as error:
        raise Usage("\n".join(error.problems)) from None
    return gateway_command.serve(loaded, log_level=options.log_level)


def settings(options: argparse.Namespace) -> gateway_settings.Settings:
    """The settings of the file, and those of the flags in their place. Raises `BadSettings`."""
    content = {} if options.config is None else settings_file.read(options.config).content
    return gateway_settings.from_mapping(_merged(content, _of_flags(options, content)))


def _of_flags(options: argparse.Namespace, content: Mapping[str, Any]) -> dict[str, Any]:
    pool: dict[str, Any] = {"name": options.pool_name}
    namespace = options.pool_namespace or _own_namespace()
    if namespace is not None:
        pool["namespace"] = namespace
    found: dict[str, Any] = {
        "inferencePool": pool,
        "listen": {
            "host": EVERYWHERE,
            "extProcPort": options.grpc_port,
            "grpcPort": None,
            "adminPort": None,
            "metricsHost": EVERYWHERE,
            "metricsPort": options.metrics_port,
        },
        "picker": {
            "healthPort": options.grpc_health_port,
            "selfSigned": options.secure_serving == "true",
            **({"conformanceTests": True} if options.conformance_tests else {}),
        },
    }
    if options.cert_path is not None:
        found["tls"] = {"certFile": str(options.cert_path / "tls.crt"), "keyFile": str(options.cert_path / "tls.key")}
    if "auth" not in content:
        found["auth"] = {"allowUnauthenticated": True}  # the proxy authenticates its clients
    return found


def _merged(content: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """`flags` in place of what `content` has, group by group."""
    merged = dict(content)
    for group, values in flags.items():
        before = content.get(group)
        merged[group] = {**before, **values} if isinstance(before, Mapping) else values
    return merged


def _own_namespace() -> str | None:
    try:
        return NAMESPACE.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
