"""`tidegate sim-engine`: one simulated engine as a process.

`tidegate up` and tests start it; it also runs in pods, to try a pool on a cluster without GPUs.
"""

import argparse
import asyncio
import contextlib
import errno
import functools
import math
import os
import signal
import sys
from collections.abc import Sequence

from aiohttp import web

import tidegate_profiles
from tidegate_control import control_server, pool_token
from tidegate_engine import engine_settings
from tidegate_policy import cost, policies
from tidegate_policy.engine import regulators
from tidegate_sim import loop_governor, openai_double, realtime

SLOWEST, FASTEST = 0.01, 1000.0
"""The range of `--speed`. Beyond it a step is shorter than the clock's resolution. The ServingPool schema has the same."""
DRAIN_S = 5.0
CONTROL = "127.0.0.1:9010"
BACKLOG = 1024
"""Connections that may wait to be accepted. A burst of clients opens many at once."""


def parser() -> argparse.ArgumentParser:
    """The command line of a simulated engine."""
    made = argparse.ArgumentParser(prog="tidegate sim-engine", description="A simulated engine.", allow_abbrev=False)
    made.add_argument(
        "--profile",
        default="a100-70b-tp8",
        metavar="NAME|FILE",
        help="cost profile that paces the engine; a100, a6000 and l40 are short names",
    )
    made.add_argument("--model", default="sim", help="model name that it serves")
    made.add_argument(
        "--adapter", action="append", default=[], metavar="NAME", help="a further model name that it serves; repeatable"
    )
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8000, help="HTTP port; 0 picks a free one (default: 8000)")
    made.add_argument(
        "--control",
        metavar="HOST:PORT",
        help=f"EngineControl's address; port 0 picks a free one (default: {CONTROL}, or a free port if that is taken)",
    )
    made.add_argument(
        "--policy", default=policies.DEFAULT, choices=sorted(policies.POLICIES), help="the scheduling policy at start"
    )
    made.add_argument("--regulators", default="", metavar="NAMES", help="regulators of each step, by commas")
    made.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="run X times as fast as the profile")
    made.add_argument(
        "--prefix-cache", action="store_true", help="computes the equal beginning of two prompts once, as vLLM does"
    )
    made.add_argument(
        "--shutdown-timeout",
        type=_shutdown_timeout,
        default=DRAIN_S,
        metavar="SECONDS",
        help="after SIGTERM, for running calls to finish (default: %(default)g)",
    )
    return made


def _speed(text: str) -> float:
    speed = float(text)
    if not SLOWEST <= speed <= FASTEST:
        raise argparse.ArgumentTypeError(f"must be between {SLOWEST:g} and {FASTEST:g}")
    return speed


def _shutdown_timeout(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:  # aiohttp reads 0 as "no limit"
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then lets running calls finish. Returns 1 when an address is taken, and 2 when the
    profile or a regulator is unknown."""
    options = parser().parse_args(argv)
    options.profile = tidegate_profiles.SHORT_NAMES.get(options.profile, options.profile)
    try:
        model = cost.from_mapping(tidegate_profiles.find(options.profile)["cost"])
        asyncio.run(_serve(options, cost.scaled(model, 1 / options.speed)))
    except tidegate_profiles.UnknownProfile as error:
        short = ", ".join(tidegate_profiles.SHORT_NAMES)
        sys.stderr.write(f"tidegate sim-engine: --profile: {error}; short names are {short}\n")
        return 2
    except regulators.UnknownRegulator as error:
        sys.stderr.write(f"tidegate sim-engine: --regulators: {error}\n")
        return 2
    except (OSError, OverflowError, control_server.CannotListen, pool_token.BadToken, cost.BadProfile) as error:
        sys.stderr.write(f"tidegate sim-engine: {error}\n")
        return 1
    return 0


async def _serve(options: argparse.Namespace, model: cost.CostModel) -> None:
    loop = asyncio.get_running_loop()
    profile = tidegate_profiles.short(options.profile)
    engine = realtime.RealtimeEngine(
        model,
        policy=options.policy,
        regulators=regulators.create(engine_settings.names(options.regulators)),
        prefix_cache=options.prefix_cache,
    )
    simulated = openai_double.SimulatedEngine(
        engine,
        openai_double.Identity(model=options.model, profile=profile, adapters=tuple(options.adapter)),
    )
    runner = web.AppRunner(
        simulated.app, access_log=None, handler_cancellation=True, shutdown_timeout=options.shutdown_timeout
    )
    await runner.setup()
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    try:
        everywhere = options.host == "::"  # of IPv4 too, as for vLLM
        site = web.TCPSite(runner, None if everywhere else options.host, options.port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken = f"port {options.port} on {options.host} is in use"
            raise OSError(f"{taken}; choose another by --port, or 0 for a free one") from None
        control = _control(loop_governor.LoopGovernor(engine, profile, loop), options.control)
        host, port = runner.addresses[0][:2]
        sys.stderr.write(f"simulated engine {profile}: http://{host}:{port}, EngineControl at {control.address}\n")
        async with asyncio.TaskGroup() as tasks:
            stepping = tasks.create_task(engine.run())
            await stopped.wait()
            await runner.cleanup()  # accepts no more calls, and waits for the calls that the engine still runs
            stepping.cancel()
        await loop.run_in_executor(None, control.stop)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()


def _control(governor: loop_governor.LoopGovernor, given: str | None) -> control_server.Serving:
    """Serves EngineControl. Raises `control_server.CannotListen` and `pool_token.BadToken`."""
    serve = functools.partial(
        control_server.serve,
        governor,
        engine_version=openai_double.VERSION,
        token=pool_token.from_environment(os.environ),
    )
    try:
        return serve(address=CONTROL if given is None else given)
    except control_server.CannotListen:
        if given is not None:
            raise
    return serve(address="127.0.0.1:0")
