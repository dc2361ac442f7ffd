"""`tidegate up`: the whole system on one machine, with nothing else to install or start.

This process supervises an embedded Valkey, the engines and the gateway, and drives the same steering loop as the operator.
The gateway and the engines run by the same commands as in containers. Ctrl-C first stops the gateway, which lets running
calls finish, then the engines and the store. A second Ctrl-C kills all processes at once.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import yaml

from tidegate_cli import embedded_valkey, engine_spec, processes, welcome
from tidegate_cli.command_errors import Failed, Usage
from tidegate_control import steering_driver
from tidegate_operator import gateway_admin
from tidegate_policy import policies
from tidegate_policy.steer import guards, steering_loop

ENGINE_START_S = {engine_spec.Simulated: 30.0, engine_spec.Vllm: 600.0, engine_spec.Running: 10.0}
INTERVAL_S = 10.0
"""Time between two decisions of the selector. It is shorter than in a cluster, because a person usually watches."""
RESTARTS, RESTARTS_S = 3, 600.0
"""A process may crash and be restarted this many times within this many seconds."""
OBSERVATION_S = 2.0
"""Time between two observations, which notice emergencies and manual overrides."""
INTERRUPTED = 130
"""The exit code when a signal interrupted the start or the shutdown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines",
        default=engine_spec.DEFAULT,
        metavar="SPEC",
        help="sim:PROFILE,... (simulated), vllm[:N] (real vLLM), or http://HOST:PORT,... (default: %(default)s)",
    )
    parser.add_argument(
        "--policy", default="auto", help="auto, or a scheduling policy to fix: " + ", ".join(sorted(policies.POLICIES))
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=9000, help="gRPC port (default: %(default)s)")
    parser.add_argument(
        "--admin-port", type=int, default=8001, help="admin port, on loopback only (default: %(default)s)"
    )
    parser.add_argument(
        "--state",
        type=pathlib.Path,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An engine that serves."""

    name: str
    url: str
    control: str | None
    cost: dict[str, Any] | None


def run(options: argparse.Namespace) -> int:
    if options.policy not in {"auto", *policies.POLICIES}:
        raise Usage(f"unknown policy {options.policy!r}; known are auto, {', '.join(sorted(policies.POLICIES))}")
    if not 0.01 <= options.sim_speed <= 1000:
        raise Usage("--sim-speed must be between 0.01 and 1000")
    wanted = engine_spec.parse(options.engines, speed=options.sim_speed)
    if options.model is not None:
        _check_model(options.model, wanted)
    if len({options.port, options.grpc_port, options.admin_port}) < 3:
        raise Usage("--port, --grpc-port and --admin-port must differ")
    for port, option in (
        (options.port, "--port"),
        (options.grpc_port, "--grpc-port"),
        (options.admin_port, "--admin-port"),
    ):
        processes.check_free(options.host, port, option)
    with _locked(options.state):
        return asyncio.run(_run(options, wanted))


def _check_model(model: str, wanted: list[engine_spec.Engine]) -> None:
    if not any(isinstance(engine, engine_spec.Vllm) for engine in wanted):
        raise Usage("--model requires --engines vllm")
    if not (pathlib.Path(model) / "config.json").is_file():
        raise Usage(f"--model: {model} is not a model folder (config.json, weights, tokenizer)")


async def _run(options: argparse.Namespace, wanted: list[engine_spec.Engine]) -> int:
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
        code = await _serve(options, wanted, family, stop)
    finally:
        sys.stderr.write("stopping: running calls may finish; press Ctrl-C again to end them\n")
        await family.stop()
    return INTERRUPTED if hurry.is_set() else code


async def _serve(
    options: argparse.Namespace, wanted: list[engine_spec.Engine], family: processes.Family, stop: asyncio.Event
) -> int:
    starting = asyncio.create_task(_start(options, wanted, family))
    interrupted = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return INTERRUPTED
    started = starting.result()
    url = f"http://{_reachable(options.host)}:{options.port}"
    sys.stdout.write(welcome.text(options, wanted, url=url, model=await _model(url)))
    sys.stdout.flush()
    return await _watch(options, started, family, interrupted)


async def _start(
    options: argparse.Namespace, wanted: list[engine_spec.Engine], family: processes.Family
) -> list[Started]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        store = await family.start("valkey", embedded_valkey.command(options.state))
        environment = _vllm_environment(wanted)
        started = await asyncio.gather(
            *(_start_engine(options, engine, family, session, environment) for engine in wanted)
        )
        await processes.wait_until(store, lambda: embedded_valkey.answers(options.state), patience_s=30)
        settings = options.state / "gateway.yaml"
        settings.write_text(yaml.safe_dump(_gateway_settings(options, started), sort_keys=False))
        gateway = await family.start("gateway", processes.ourselves("gateway", "--config", str(settings)), stop_s=40)
        url = f"http://{_reachable(options.host)}:{options.port}/ready"
        await processes.wait_until(gateway, lambda: _answers(session, url), patience_s=30)
    return started


async def _start_engine(
    options: argparse.Namespace,
    engine: engine_spec.Engine,
    family: processes.Family,
    session: aiohttp.ClientSession,
    environment: Mapping[str, str],
) -> Started:
    if isinstance(engine, engine_spec.Running):
        if not await _lists_models(session, engine.url):
            raise Failed(f"{engine.url}/v1/models lists no models. Check that an OpenAI-compatible engine runs there.")
        return Started(name=engine.name, url=engine.url, control=None, cost=None)
    port, control = processes.free_port(), f"127.0.0.1:{processes.free_port()}"
    url = f"http://127.0.0.1:{port}"
    listen = ["--host", "127.0.0.1", "--port", str(port), "--control", control]
    if isinstance(engine, engine_spec.Simulated):
        words = ["sim-engine", *listen, "--profile", engine.profile, "--speed", str(options.sim_speed)]
        cost: dict[str, Any] | None = dataclasses.asdict(engine.cost)
    else:
        words, cost = ["engine", *listen, *_vllm_flags(options.model)], None
    child = await family.start(engine.name, processes.ourselves(*words), stop_s=40, environment=environment)
    await processes.wait_until(
        child, lambda: _answers(session, f"{url}/health"), patience_s=ENGINE_START_S[type(engine)]
    )
    return Started(name=engine.name, url=url, control=control, cost=cost)


def _vllm_environment(wanted: list[engine_spec.Engine]) -> dict[str, str]:
    count = sum(isinstance(engine, engine_spec.Vllm) for engine in wanted)
    if not count:
        return {}
    sys.stderr.write("starting vLLM; this takes about a minute on a CPU\n")
    return engine_spec.vllm_environment(count, cores=len(os.sched_getaffinity(0)), given=os.environ)


def _vllm_flags(model: str | None) -> list[str]:
    from tidegate_engine import checkpoints

    directory = checkpoints.smollm2() if model is None else pathlib.Path(model)
    # In bfloat16 a small model's answers depend on the CPU's instruction set.
    precision = [] if engine_spec.has_gpu() else ["--dtype", "float32"]
    return ["--model", str(directory), "--served-model-name", directory.name, "--enforce-eager", *precision]


def _gateway_settings(options: argparse.Namespace, started: list[Started]) -> dict[str, Any]:
    return {
        "listen": {
            "host": options.host,
            "port": options.port,
            "grpcPort": options.grpc_port,
            "adminPort": options.admin_port,
        },
        "engines": [
            {key: value for key, value in dataclasses.asdict(engine).items() if value is not None} for engine in started
        ],
        "store": {"url": embedded_valkey.url(options.state), "pool": "up"},
    }


async def _watch(
    options: argparse.Namespace, started: list[Started], family: processes.Family, interrupted: asyncio.Task[bool]
) -> int:
    """Serves until a signal arrives or a process crashes too often; returns the exit code."""
    steered = asyncio.create_task(_steer(options, [engine.control for engine in started if engine.control]))
    kept = asyncio.create_task(_keep(family))
    try:
        await asyncio.wait({steered, kept, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if interrupted.done():
            return 0
        for task in (kept, steered):
            if task.done():
                task.result()
        raise Failed("the steering loop ended unexpectedly")
    finally:
        for task in (steered, kept):
            task.cancel()
        await asyncio.gather(steered, kept, return_exceptions=True)


async def _keep(family: processes.Family) -> None:
    """Restarts processes that crash, while the others keep serving. Raises `Failed` when a process crashes too often."""
    crashes: defaultdict[str, list[float]] = defaultdict(list)
    while True:
        child = await family.first_crash()
        now = time.monotonic()
        crashes[child.name] = [*(at for at in crashes[child.name] if now - at < RESTARTS_S), now]
        if len(crashes[child.name]) > RESTARTS:
            raise Failed(
                f"everything stops, because {child.name} crashed {RESTARTS + 1} times in a short time; it {child.end()}"
            )
        sys.stderr.write(f"{child.name} {child.end()}; it is restarted\n")
        await family.restart(child)


async def _steer(options: argparse.Namespace, controls: list[str]) -> None:
    settings = steering_loop.Settings(
        allow=tuple(sorted(policies.POLICIES)),
        interval_s=INTERVAL_S,
        guards=guards.GuardSettings(dwell_s=3 * INTERVAL_S),
    )
    held = None if options.policy == "auto" else steering_loop.Override(policy=options.policy, reason="--policy")
    driver = steering_driver.SteeringDriver(None, settings, now=time.time())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        admin = gateway_admin.GatewayAdmin(session, f"http://127.0.0.1:{options.admin_port}")
        try:
            await driver.retarget(controls)
            while True:
                await asyncio.sleep(OBSERVATION_S)
                outcome = driver.observe(time.time(), await admin.override() or held)
                if outcome.verdict.kind is not guards.Kind.KEEP:
                    sys.stderr.write(f"policy {outcome.verdict.policy}: {outcome.verdict.reason}\n")
                await driver.enforce()
                await admin.follow(outcome.state.active, outcome.state.reason)
        finally:
            await driver.close()


async def _lists_models(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/v1/models") as response:
            return bool((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        return False


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _model(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host


def _default_state() -> pathlib.Path:
    home = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    return pathlib.Path(home) / "tidegate"


@contextlib.contextmanager
def _locked(state: pathlib.Path) -> Iterator[None]:
    """Holds a lock, so that a second `tidegate up` cannot use the same data."""
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(state / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Failed(f"the state folder {state} cannot be used: {error.strerror}; choose another by --state") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise Failed(f"another `tidegate up` uses {state}; stop it or choose another folder by --state") from None
    try:
        yield
    finally:
        os.close(handle)
