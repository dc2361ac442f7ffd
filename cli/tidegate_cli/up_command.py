"""`tidegate up`: the whole system on one machine, with nothing else to install or start.

This module checks the command line, locks the state folder and handles signals. `up_start` starts the processes, and
`up_supervision` supervises and steers them. Ctrl-C first stops the gateway, which lets running calls finish, then the
engines and the store. A second Ctrl-C kills all processes at once.
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import pathlib
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence

from tidegate_cli import engine_spec, processes, up_settings, up_start, up_supervision, welcome
from tidegate_cli.command_errors import Failed, Usage
from tidegate_control import pool_token
from tidegate_policy import policies

TOKEN_BYTES = 32
"""Random bytes of the token that the processes of a run share, unless TIDEGATE_POOL_TOKEN or the settings have one."""
INTERRUPTED = 130
"""The exit code when a signal interrupted the start or the shutdown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines",
        metavar="SPEC",
        help="sim:PROFILE,... (simulated), vllm[:N] (real vLLM), or http://HOST:PORT,... "
        f"(default: the engines of the settings file, else {engine_spec.DEFAULT})",
    )
    parser.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="FILE",
        help="settings file (docs/settings.md); options win over it",
    )
    parser.add_argument(
        "--policy", default="auto", help="auto, or a scheduling policy to fix: " + ", ".join(sorted(policies.POLICIES))
    )
    parser.add_argument("--host", help="address to serve on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="HTTP port (default: 8000)")
    parser.add_argument("--grpc-port", type=int, help="gRPC port (default: 9000)")
    parser.add_argument("--admin-port", type=int, help="admin port, on loopback only (default: 8001)")
    parser.add_argument(
        "--state",
        type=_folder,
        default=_default_state(),
        metavar="DIR",
        help="folder for data and logs (default: %(default)s)",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="model directory for vllm (default: a small demo model from a package)"
    )
    parser.add_argument(
        "--sim-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="simulated engines run X times as fast as their profiles (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    if options.policy not in {"auto", *policies.POLICIES}:
        raise Usage(f"unknown policy {options.policy!r}; known are auto, {', '.join(sorted(policies.POLICIES))}")
    if not 0.01 <= options.sim_speed <= 1000:
        raise Usage("--sim-speed must be between 0.01 and 1000")
    combined = up_settings.combine(options)
    token = _token(combined.settings.auth.pool_token)
    if options.model is not None:
        _check_model(options.model, combined.wanted)
    if len({options.port, options.grpc_port, options.admin_port}) < 3:
        raise Usage("--port, --grpc-port and --admin-port must differ")
    ports = {"--port": options.port, "--grpc-port": options.grpc_port, "--admin-port": options.admin_port}
    processes.check_all_free(options.host, {option: port for option, port in ports.items() if port is not None})
    with _locked(options.state):
        return asyncio.run(_run(options, combined, token))


def _token(in_settings: str | None) -> str:
    """The token that the processes of the run share."""
    try:
        given = pool_token.from_environment(os.environ)
    except pool_token.BadToken as error:
        raise Usage(str(error)) from None
    return given or in_settings or secrets.token_urlsafe(TOKEN_BYTES)


def _check_model(model: str, wanted: Sequence[engine_spec.Engine]) -> None:
    if not any(isinstance(engine, engine_spec.Vllm) for engine in wanted):
        raise Usage("--model requires --engines vllm")
    if not (pathlib.Path(model) / "config.json").is_file():
        raise Usage(f"--model: {model} is not a model folder (config.json, weights, tokenizer)")


async def _run(options: argparse.Namespace, combined: up_settings.Combined, token: str) -> int:
    loop, stop, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    family = processes.Family(options.state / "logs")

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
            family.kill()
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)
    try:
        code = await _serve(options, combined, family, stop, token)
    finally:
        if stop.is_set():
            sys.stderr.write("stopping: running calls may finish; press Ctrl-C again to end them\n")
        await family.stop()
    return INTERRUPTED if hurry.is_set() else code


async def _serve(
    options: argparse.Namespace,
    combined: up_settings.Combined,
    family: processes.Family,
    stop: asyncio.Event,
    token: str,
) -> int:
    starting = asyncio.create_task(up_start.start(options, combined, family, token=token))
    interrupted = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return INTERRUPTED
    started = starting.result()
    url = up_start.gateway_url(options, encrypted=combined.settings.tls.cert_file is not None)
    model = await up_start.served_model(options) or "MODEL"
    needs_key = combined.settings.auth.required
    sys.stdout.write(welcome.text(options, combined.wanted, url=url, model=model, needs_key=needs_key))
    sys.stdout.flush()
    controls = {engine.control: engine.name for engine in started if engine.control}
    await up_supervision.supervise(options, controls, family, interrupted, token=token)
    return 0


def _default_state() -> pathlib.Path:
    home = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    return pathlib.Path(home) / "tidegate"


def _folder(path: str) -> pathlib.Path:
    """The absolute path: the store works in the folder, and would seek a relative path from there."""
    return pathlib.Path(path).absolute()


@contextlib.contextmanager
def _locked(state: pathlib.Path) -> Iterator[None]:
    """Holds a lock, so that a second `tidegate up` cannot use the same data."""
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(state / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise Failed(f"the state folder {state} cannot be used: {why}; choose another by --state") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise Failed(f"another `tidegate up` uses {state}; stop it or choose another folder by --state") from None
    try:
        yield
    finally:
        os.close(handle)
