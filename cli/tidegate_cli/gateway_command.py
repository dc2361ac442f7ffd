"""`tidegate gateway`: a gateway process, as its container runs it."""

import argparse
import asyncio
import os
import pathlib

import uvloop

from tidegate_cli.command_errors import Failed, Usage
from tidegate_gateway import app, gateway_settings, settings_decoder
from tidegate_gateway.observe import log_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=pathlib.Path, required=True, metavar="FILE", help="settings file, YAML or JSON"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def run(options: argparse.Namespace) -> int:
    log_lines.configure(options.log_level.upper())
    try:
        loaded = gateway_settings.load(options.config, os.environ)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(app.run(loaded, file=options.config))
    except settings_decoder.BadSettings as error:
        raise Usage("\n".join(error.problems)) from None
    except OSError as error:
        raise Failed(f"the gateway cannot listen: {error}") from None
    return 0
