"""Starts the processes of `tidegate up`: an embedded Valkey, the engines, and the gateway.

The gateway and the engines run by the same commands as in containers. An engine that is given by URL is only checked.
"""

import argparse
import asyncio
import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import yaml

from tidegate_cli import embedded_valkey, engine_spec, processes, up_settings
from tidegate_cli.command_errors import Failed
from tidegate_control import pool_token
from tidegate_gateway import gateway_settings
from tidegate_gateway.store import store_contract, valkey_store

ENGINE_START_S = {engine_spec.Simulated: 30.0, engine_spec.Vllm: 600.0, engine_spec.Running: 10.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An engine that serves."""

    name: str
    url: str
    control: str | None
    cost: dict[str, Any] | None


async def start(
    options: argparse.Namespace, combined: up_settings.Combined, family: processes.Family, *, token: str
) -> list[Started]:
    """Starts the store, the engines and the gateway; returns the engines when all parts answer. Their environment has
    `token`. Raises `Failed`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        store = None
        if combined.embedded_store:
            store = await family.start("valkey", embedded_valkey.command(options.state))
        else:
            await _check_store(combined.settings.store)
        shared = {pool_token.VARIABLE: token}
        environment = _vllm_environment(combined.wanted) | shared
        started = await asyncio.gather(
            *(_start_engine(options, engine, family, session, environment) for engine in combined.wanted)
        )
        if store is not None:
            await processes.wait_until(store, lambda: embedded_valkey.answers(options.state), patience_s=30)
        settings = options.state / "gateway.yaml"
        document = up_settings.gateway_document(options, combined, [_entry(engine) for engine in started])
        settings.write_text(yaml.safe_dump(document, sort_keys=False))
        command = processes.ourselves("gateway", "--config", str(settings))
        gateway = await family.start("gateway", command, stop_s=40, environment=shared)
        await processes.wait_until(gateway, lambda: _is_ready(options), patience_s=30)
    return started


async def _check_store(settings: gateway_settings.Store) -> None:
    """Raises `Failed` unless the store of the settings answers."""
    store = valkey_store.Valkey(settings, gateway="up")
    try:
        await store.ping()
    except store_contract.Unavailable as error:
        raise Failed(
            f"{error}. Start it, correct store.url (or TIDEGATE_STORE_URL), or leave it out: `tidegate up` then starts one."
        ) from None
    finally:
        await store.close()


def _entry(engine: Started) -> dict[str, Any]:
    """The engine in the gateway's settings."""
    return {key: value for key, value in dataclasses.asdict(engine).items() if value is not None}


async def _start_engine(
    options: argparse.Namespace,
    engine: engine_spec.Engine,
    family: processes.Family,
    session: aiohttp.ClientSession,
    environment: Mapping[str, str],
) -> Started:
    if isinstance(engine, engine_spec.Running):
        if not await _lists_models(session, engine.url):
            absent = f"{engine.url} cannot be reached, or lists no models on /v1/models"
            raise Failed(f"{absent}. Check that an engine runs there.")
        return Started(name=engine.name, url=engine.url, control=engine.control, cost=None)
    port, control = processes.free_port(), f"127.0.0.1:{processes.free_port()}"
    url = f"http://127.0.0.1:{port}"
    listen = ["--host", "127.0.0.1", "--port", str(port), "--control", control]
    if isinstance(engine, engine_spec.Simulated):
        words = ["sim-engine", *listen, "--profile", engine.profile, "--speed", str(options.sim_speed)]
        cost: dict[str, Any] | None = dataclasses.asdict(engine.cost)
    else:
        words, cost = ["engine", *listen, *vllm_flags(options.model)], None
    child = await family.start(engine.name, processes.ourselves(*words), stop_s=40, environment=environment)
    await processes.wait_until(
        child, lambda: _answers(session, f"{url}/health"), patience_s=ENGINE_START_S[type(engine)]
    )
    return Started(name=engine.name, url=url, control=control, cost=cost)


def _vllm_environment(wanted: Sequence[engine_spec.Engine]) -> dict[str, str]:
    count = sum(isinstance(engine, engine_spec.Vllm) for engine in wanted)
    if not count:
        return {}
    sys.stderr.write("starting vLLM; this takes about a minute on a CPU\n")
    return engine_spec.vllm_environment(count, cores=len(os.sched_getaffinity(0)), given=os.environ)


def vllm_flags(model: str | None) -> list[str]:
    """The flags that name the model to a real engine. Raises `Failed`."""
    from tidegate_engine import checkpoints

    try:
        directory = checkpoints.smollm2() if model is None else pathlib.Path(model)
    except checkpoints.MissingPackage as error:
        raise Failed(f"{error}: `make install` installs all, or --model names another model") from None
    # In bfloat16 a small model's answers depend on the CPU's instruction set.
    return ["--model", str(directory), "--served-model-name", directory.name, "--enforce-eager"]


def gateway_url(options: argparse.Namespace, *, encrypted: bool) -> str:
    """The address of the gateway as a client on this machine reaches it."""
    host = options.host
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'https' if encrypted else 'http'}://{reachable}:{options.port}"


async def served_model(options: argparse.Namespace) -> str | None:
    """The model that the gateway serves; None while it is not ready. Its admin port tells, where clients need no key."""
    timeout = aiohttp.ClientTimeout(total=2)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            async with session.get(f"http://127.0.0.1:{options.admin_port}/admin/state") as response:
                state = await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return None
    return state["model"] if state["status"] in ("ready", "degraded") else None


async def _is_ready(options: argparse.Namespace) -> bool:
    return await served_model(options) is not None


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
