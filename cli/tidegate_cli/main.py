"""The `tidegate` program: the table of its commands.

A command is a module with `add_arguments(parser)` and `run(options) -> exit code`. A component that runs in a container has
`parser()` and `main(words)`, and receives the rest of the command line. A module is imported when its command runs, so
`tidegate version` loads neither vLLM nor a Kubernetes client.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Sequence

from tidegate_cli.command_errors import CommandError, Usage

COMPONENTS = {
    "operator": ("tidegate_operator.__main__", "the Kubernetes operator, as its container runs it"),
    "engine": ("tidegate_engine.vllm_server", "run vLLM with Tidegate's scheduler; vLLM's flags pass through"),
    "sim-engine": ("tidegate_sim.engine_double", "a simulated engine with vLLM's HTTP API"),
    "weights": ("tidegate_operator.weights.weights_command", "download the weights of a model into a cache"),
    "bench": ("tidegate_sim.bench", "evaluate policies in virtual time, with vLLM's scheduler or a fast model of it"),
}
COMMANDS = {
    "gateway": ("tidegate_cli.gateway_command", "the gateway, as its container runs it"),
    "picker": (
        "tidegate_cli.picker_command",
        "the endpoint picker of an InferencePool, with the reference picker's flags",
    ),
    "up": ("tidegate_cli.up_command", "the whole system on this machine"),
    "config": ("tidegate_cli.config_command", "check, explain and show the settings of a gateway"),
    "top": ("tidegate_cli.top_command", "the state of a running gateway, live in the terminal"),
    "replay": ("tidegate_cli.replay_command", "replay a trace against a running gateway, open loop"),
    "profile": ("tidegate_cli.profile_command", "measure the cost profile of a live engine"),
    "policy": ("tidegate_cli.policy_command", "read or override the active policy"),
    "trace": ("tidegate_cli.trace_command", "make a trace of a public data set"),
    "completion": ("tidegate_cli.completion_command", "print the completion script of a shell"),
    "version": ("tidegate_cli.version_command", "versions of Tidegate and of the packages that it uses"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for a failure, 2 for a usage error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if os.getpid() == 1:
        # The kernel drops SIGTERM for a container's first process until it has a handler, and imports take long.
        signal.signal(signal.SIGTERM, _terminated)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC would log every peer that disconnects
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)  # it has a traceback for each message that is none
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # what reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process
        return 1
    except KeyboardInterrupt:  # also while a command is still imported
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tidegate"):
            raise
        sys.stderr.write(
            f"tidegate {words[0]}: the package {error.name} is not installed; `make install` installs all packages\n"
        )
        return 1


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _run(words: list[str]) -> int:
    if words and words[0] in COMPONENTS:
        module = importlib.import_module(COMPONENTS[words[0]][0])
        return int(module.main(words[1:]))
    options, unknown = _parser(words[0] if words else "").parse_known_args(words)
    try:
        if unknown:
            raise Usage(f"{unknown[0]!r} is no option or argument of this command; --help after the command lists all")
        return int(options.run(options))
    except CommandError as error:
        sys.stderr.write(f"tidegate {words[0]}: {error}\n")
        return error.exit_code


def whole_parser() -> argparse.ArgumentParser:
    """The parser with the options of every command, for the reference and the completion of shells. A component whose
    packages are not installed has no options in it."""
    return _parser(*COMPONENTS, *COMMANDS)


def _parser(*chosen: str) -> argparse.ArgumentParser:
    """The parser with the options of the chosen commands."""
    parser = argparse.ArgumentParser(
        prog="tidegate",
        description="Deadline-aware LLM serving.",
        epilog="`tidegate COMMAND --help` explains a command.",
    )
    version = f"tidegate {importlib.metadata.version('tidegate')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMPONENTS.items():
        parents = []
        with contextlib.suppress(ModuleNotFoundError):
            parents = [importlib.import_module(module_name).parser()] if name in chosen else []
        commands.add_parser(name, help=summary, add_help=False, parents=parents)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
