"""The example of one endpoint for several models: an Envoy sends each request to the gateway of the pool with its model."""

import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import envoy_process
import openai
import pytest
import yaml

import fake_engine
from tidegate_cli import processes

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples" / "envoy-models.yaml"
MODELS = ("small", "large")


@contextlib.asynccontextmanager
async def endpoint(up: Any, folder: pathlib.Path) -> AsyncIterator[tuple[str, dict[str, fake_engine.FakeEngine]]]:
    """Two pools of one engine each behind the example's Envoy: its URL, and the engine of each model."""
    config = yaml.safe_load(EXAMPLE.read_text())
    listener, clusters = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"]
    listener["address"]["socket_address"]["port_value"] = processes.free_port()
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": processes.free_port()}}}
    async with contextlib.AsyncExitStack() as stack:
        engines = {}
        for name, cluster in zip(MODELS, clusters, strict=True):
            assert cluster["name"] == name
            engines[name] = await stack.enter_async_context(fake_engine.engine(model=name))
            client = await stack.enter_async_context(up(engines[name]))
            (address,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            address["endpoint"]["address"]["socket_address"]["port_value"] = int(client.url.rpartition(":")[2])
        yield await stack.enter_async_context(envoy_process.envoy(folder, config)), engines


async def test_each_call_reaches_the_pool_with_its_model(up: Any, tmp_path: pathlib.Path) -> None:
    async with (
        endpoint(up, tmp_path) as (url, engines),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for name in MODELS:
            answer = await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hello"}])
            assert answer.model == name
            stream = await client.completions.create(model=name, prompt="hello", stream=True)
            assert [event async for event in stream]
            await client.embeddings.create(model=name, input="hello")
        assert [engines[name].served for name in MODELS] == [3, 3]
        assert {model.id async for model in client.models.list()} == set(MODELS)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="huge", prompt="hello")
        assert caught.value.code == "model_not_found"
        assert [engines[name].served for name in MODELS] == [3, 3]


async def test_a_request_without_a_model_names_its_pool(up: Any, tmp_path: pathlib.Path) -> None:
    async with endpoint(up, tmp_path) as (url, _), aiohttp.ClientSession() as http:
        stages = {"stages": [{"name": "only"}], "deadline_ms": 60_000}
        headers = {"x-tidegate-pool": "large"}
        async with http.post(f"{url}/v1/workflows", json=stages, headers=headers) as answer:
            assert answer.status == 201, await answer.text()
            workflow = (await answer.json())["id"]
        for pool, status in (("large", 200), ("small", 404)):
            async with http.get(f"{url}/v1/workflows/{workflow}", headers={"x-tidegate-pool": pool}) as answer:
                assert answer.status == status
        call = {"model": "large", "prompt": "x"}
        own = {"x-tidegate-workflow": workflow, "x-tidegate-stage": "only"}
        async with http.post(f"{url}/v1/completions", json=call, headers=own) as answer:
            assert answer.status == 200
        async with http.get(f"{url}/v1/workflows/{workflow}", headers=headers) as answer:
            assert (await answer.json())["state"] == "done"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model": 7}', b'{"model": {"model": "small"}}', b'{"prompt": "x"}', b"\xff\xfe"]
)
async def test_a_body_that_names_no_model_gets_an_error_and_reaches_no_engine(
    up: Any, tmp_path: pathlib.Path, body: bytes
) -> None:
    async with endpoint(up, tmp_path) as (url, engines), aiohttp.ClientSession() as http:
        headers = {"content-type": "application/json"}
        async with http.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"
        async with http.post(
            f"{url}/v1/completions", data=body, headers=headers | {"x-tidegate-pool": "small"}
        ) as answer:
            assert answer.status in (400, 404)
        assert [engine.served for engine in engines.values()] == [0, 0]
        async with http.get(f"{url}/metrics") as answer:
            assert answer.status == 404
