"""`tidegate gateway`: a gateway process, as its container runs it."""

import argparse
import asyncio
import contextlib
import ctypes
import os
import pathlib

import uvloop

from tidegate_cli.command_errors import Failed, Usage
from tidegate_control import log_lines
from tidegate_gateway import app, gateway_settings, settings_decoder

MALLOPT_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 256 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=pathlib.Path, required=True, metavar="FILE", help="settings file, YAML or JSON"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def run(options: argparse.Namespace) -> int:
    try:
        loaded = gateway_settings.load(options.config, os.environ)
    except settings_decoder.BadSettings as error:
        raise Usage("\n".join(error.problems)) from None
    return serve(loaded, log_level=options.log_level, file=options.config)


def serve(loaded: gateway_settings.Settings, *, log_level: str, file: pathlib.Path | None = None) -> int:
    """Runs a gateway until a signal ends it. `file` is the settings file, whose changes are taken over."""
    log_lines.configure(log_level.upper())
    _free_large_blocks()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(app.run(loaded, file=file))
    except settings_decoder.BadSettings as error:
        raise Usage("\n".join(error.problems)) from None
    except OSError as error:
        raise Failed(f"the gateway cannot start: {error.strerror or error}") from None
    return 0


def _free_large_blocks() -> None:
    """Lets glibc give the memory of large bodies back to the kernel. By itself it keeps blocks of up to 32 MiB once it has
    seen their size. Other C libraries have no such setting."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(MALLOPT_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
