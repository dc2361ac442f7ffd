"""The cases of the Gateway API Inference Extension's conformance suite (v1.6) that concern an endpoint picker, through a
real Envoy. docs/envoy.md has the table of cases and tests."""

import asyncio
import collections
import contextlib
import hashlib
import json
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import echo_pods
import envoy_process
import pytest

import fake_engine
from tidegate_cli import processes

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
SELECTED = "x-conformance-test-selected-endpoint"
BODY = {"model": "conformance-fake-model", "prompt": "What are the advantages of genetically modified food?"}
STREAMED = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
}
MODES = pytest.mark.parametrize(
    "mode", [pytest.param({}, id="buffered"), pytest.param(STREAMED, id="streamed both ways")]
)
REQUESTS, AT_ONCE = 100, 10
TESTED = {"picker": {"conformanceTests": True}, "listen": {"extProcPort": 0}}


class Asking:
    """A client of one Envoy."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url

    async def ask(
        self, selection: str | None = None, *, path: str = "/primary-gateway-test", method: str = "POST", **options: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, the JSON of the answer, and its headers."""
        headers = dict(options.pop("headers", {})) | ({} if selection is None else {SELECTION: selection})
        if method == "POST" and "data" not in options:
            options["json"] = BODY
        async with self.http.request(method, self.url + path, headers=headers, **options) as answer:
            return answer.status, await answer.json(content_type=None), answer.headers

    async def counts(self, selection: str | None, **options: Any) -> collections.Counter[tuple[str, int]]:
        """The pods and ports that serve many equal requests; each of them must succeed."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one() -> tuple[str, int]:
            async with turns:
                status, said, _ = await self.ask(selection, **options)
                assert status == 200, said
                return said["pod"], said["port"]

        return collections.Counter(await asyncio.gather(*(one() for _ in range(REQUESTS))))


@contextlib.asynccontextmanager
async def asking(
    up: Any,
    folder: pathlib.Path,
    pods: Sequence[echo_pods.EchoPod],
    mode: dict[str, Any] | None = None,
    *,
    change: Any = None,
    **settings: Any,
) -> AsyncIterator[tuple[Asking, Any]]:
    """An Envoy whose picker knows these pods. `change` changes its configuration."""
    merged = {key: {**TESTED[key], **settings.pop(key, {})} for key in TESTED}
    async with up(*echo_pods.all_settings(pods), **merged, **settings) as client:
        endpoints = echo_pods.all_endpoints(pods)
        config = envoy_process.configuration(
            client.ext_proc, endpoints, failure_mode_allow=False, processing_mode=mode or {}
        )
        envoy_process.route_all(config)
        if change is not None:
            change(config)
        async with envoy_process.envoy(folder, config) as url, aiohttp.ClientSession() as http:
            yield Asking(http, url), client


# GatewayFollowingEPPRouting


@MODES
async def test_requests_go_to_the_endpoints_that_they_name_and_to_no_other(
    up: Any, until: Any, tmp_path: pathlib.Path, mode: dict[str, Any]
) -> None:
    async with (
        echo_pods.echo_pods("pod-0", "pod-1", "pod-2") as pods,
        asking(up, tmp_path, pods, mode) as (envoy, client),
    ):
        for pod in pods:
            status, said, _ = await envoy.ask(pod.ip)
            assert (status, said["pod"], said["path"]) == (200, pod.name, "/primary-gateway-test")
            assert said["headers"][SELECTION] == pod.ip, "the suite compares the headers at the pod"
            assert json.loads(said["body"]) == BODY
        for chosen in (pods[2:], pods[:2], pods):
            found = await envoy.counts(",".join(pod.ip for pod in chosen))
            assert {pod for pod, _ in found} == {pod.name for pod in chosen}
        await until(lambda: client.gateway.placements.in_progress == 0)


async def test_an_endpoint_that_does_not_exist_gets_503(up: Any, tmp_path: pathlib.Path) -> None:
    async with echo_pods.echo_pods("pod-0") as pods, asking(up, tmp_path, pods) as (envoy, _):
        status, said, _ = await envoy.ask("256.256.256.256")
        assert (status, said["error"]["code"]) == (503, "no-engines")
        assert (await envoy.ask(f" 256.256.256.256 , {pods[0].ip}"))[0] == 200


# GatewayFollowingEPPRoutingWithDataParallelism


@MODES
async def test_each_port_of_a_pod_is_an_endpoint(up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]) -> None:
    async with (
        echo_pods.echo_pods("pod-0", "pod-1", "pod-2", ports=3) as pods,
        asking(up, tmp_path, pods, mode, dispatch={"rule": "round-robin"}) as (envoy, _),
    ):
        ports = pods[0].ports
        found = await envoy.counts(pods[1].ip)
        assert set(found) == {("pod-1", port) for port in ports}
        found = await envoy.counts(f"{pods[0].ip},{pods[2].ip}:{ports[1]}")
        assert set(found) == {*(("pod-0", port) for port in ports), ("pod-2", ports[1])}
        found = await envoy.counts(f"{pods[0].ip},{pods[1].ip}:{ports[0]},{pods[1].ip}:{ports[2]},{pods[2].ip}")
        assert {port for pod, port in found if pod == "pod-1"} == {ports[0], ports[2]}
        assert {pod for pod, _ in found} == {"pod-0", "pod-1", "pod-2"}


# GatewayDestinationEndpointServed


@MODES
async def test_an_answer_tells_the_endpoint_that_served(up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]) -> None:
    async with (
        echo_pods.echo_pods("pod-0", "pod-1", "pod-2") as pods,
        asking(up, tmp_path, pods, mode) as (envoy, _),
    ):
        for pod in pods:
            status, said, headers = await envoy.ask(pod.ip, path="/destination-endpoint-served-test")
            assert (status, said["pod"]) == (200, pod.name)
            assert [headers[SERVED], headers[SELECTED]] == pod.endpoints * 2


async def test_the_choice_is_never_told_as_what_served(up: Any, tmp_path: pathlib.Path) -> None:
    def tell_nothing(config: dict[str, Any]) -> None:
        filters = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        filters["http_filters"][0]["typed_config"]["metadata_options"]["forwarding_namespaces"]["untyped"] = []

    async with (
        echo_pods.echo_pods("pod-0") as pods,
        asking(up, tmp_path, pods, change=tell_nothing) as (envoy, _),
    ):
        _, _, headers = await envoy.ask()
        assert headers[SERVED].startswith("fail:")
        assert headers[SELECTED] == pods[0].endpoints[0]


# GatewayWeightedAcrossTwoInferencePools


@MODES
async def test_two_pools_share_by_weight_and_each_picker_keeps_to_its_pool(
    up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]
) -> None:
    async with (
        echo_pods.echo_pods("primary-0", "primary-1", "primary-2") as primary,
        echo_pods.echo_pods("secondary-0", "secondary-1", "secondary-2", first=5) as secondary,
        up(*echo_pods.all_settings(secondary), **TESTED) as second,
    ):

        def split(config: dict[str, Any]) -> None:
            added = envoy_process.add_pool(config, "secondary", second.ext_proc, echo_pods.all_endpoints(secondary))
            weighted = [{"name": "engines", "weight": 70}, {"name": "secondary", "weight": 30, **added}]
            route = {"weighted_clusters": {"clusters": weighted}}
            envoy_process.set_routes(config, {"match": {"prefix": "/"}, "route": route})

        union = ",".join(pod.ip for pod in [*primary, *secondary])
        async with asking(up, tmp_path, primary, mode, change=split) as (envoy, _):
            found: collections.Counter[str] = collections.Counter()
            for _ in range(2):
                for (pod, _), count in (await envoy.counts(union, path="/weighted-two-pools-test")).items():
                    found[pod.rpartition("-")[0]] += count
        assert found.total() == 200
        assert abs(found["primary"] / 200 - 0.7) <= 0.1


# HTTPRouteMultipleRulesDifferentPools, HTTPRouteMultipleGatewaysDifferentPools, InferencePoolHTTPRoutePortValidation


@MODES
async def test_a_get_without_a_body_reaches_the_pool_of_its_rule(
    up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]
) -> None:
    async with (
        echo_pods.echo_pods("primary") as primary,
        echo_pods.echo_pods("secondary", first=5) as secondary,
        up(*echo_pods.all_settings(secondary), **TESTED) as second,
    ):

        def by_path(config: dict[str, Any]) -> None:
            added = envoy_process.add_pool(config, "secondary", second.ext_proc, echo_pods.all_endpoints(secondary))
            envoy_process.set_routes(
                config,
                {"match": {"prefix": "/primary"}, "route": {"cluster": "engines"}},
                {"match": {"prefix": "/secondary"}, "route": {"cluster": "secondary"}, **added},
            )

        async with asking(up, tmp_path, primary, mode, change=by_path) as (envoy, _):
            for path in ("/primary", "/secondary"):
                status, said, headers = await envoy.ask(method="GET", path=path)
                assert (status, said["pod"], said["method"]) == (200, path[1:], "GET")
                assert headers[SERVED] == headers[SELECTED]


# InferencePoolAppProtocol


@MODES
async def test_a_port_of_any_protocol_is_an_endpoint(up: Any, tmp_path: pathlib.Path, mode: dict[str, Any]) -> None:
    """The server speaks HTTP/2 in plain text (h2c) and nothing else. It is a second port of the same Envoy."""
    port = processes.free_port()
    server = echo_pods.EchoPod(name="h2c", ip="127.0.0.1", ports=[port])
    async with up(*server.settings(), seen=False, **TESTED) as client, aiohttp.ClientSession() as http:
        config = envoy_process.configuration(
            client.ext_proc, server.endpoints, failure_mode_allow=False, processing_mode=mode
        )
        envoy_process.route_all(config)
        envoy_process.h2c_to_engines(config, server.endpoints[0])
        async with envoy_process.envoy(tmp_path, config) as url:
            async with asyncio.timeout(20):
                while not client.all_accepting():
                    await asyncio.sleep(0.05)
            async with http.post(url + "/app-protocol", json=BODY, headers={SELECTION: server.endpoints[0]}) as answer:
                assert (answer.status, await answer.text()) == (200, "over h2c")
                assert answer.headers[SERVED] == server.endpoints[0]


# Requests that are no calls


@MODES
@pytest.mark.parametrize(
    ("method", "path", "data"),
    [
        ("POST", "/any/path?with=a&query", b"\x00\xff no JSON"),
        ("POST", "/empty", b""),
        ("POST", "/large", b"x" * 300_000),
        ("PUT", "/any", b"{"),
        ("DELETE", "/v1/completions", None),
        ("GET", "/", None),
        ("HEAD", "/head", None),
    ],
)
async def test_any_request_passes_as_it_came(
    up: Any, until: Any, tmp_path: pathlib.Path, mode: dict[str, Any], method: str, path: str, data: bytes | None
) -> None:
    sent = {"x-any": "1", "content-encoding": "x-own", "authorization": "Bearer secret"}
    async with echo_pods.echo_pods("pod-0") as pods, asking(up, tmp_path, pods, mode) as (envoy, client):
        status, said, _ = await envoy.ask(method=method, path=path, data=data, headers=sent)
        assert (status, pods[0].seen) == (200, [f"{method} {path.partition('?')[0]}"])
        if method != "HEAD":
            assert (said["path"], said["body"]) == (path, (data or b"").decode("latin-1"))
            assert (said["headers"]["x-any"], said["headers"]["content-encoding"]) == ("1", "x-own")
            assert "authorization" not in said["headers"]
        await until(lambda: not client.own_backlog())


async def test_a_call_passes_as_a_call(up: Any, tmp_path: pathlib.Path) -> None:
    async with echo_pods.echo_pods("pod-0") as pods, asking(up, tmp_path, pods) as (envoy, _):
        status, said, _ = await envoy.ask(path="/v1/completions")
        assert status == 200
        body = json.loads(said["body"])
        assert body["prompt"] == BODY["prompt"]
        assert body["vllm_xargs"], "the labels of the gateway"


# EppUnAvailableFailOpen and InferencePoolInvalidEPPService


@pytest.mark.parametrize(("goes_on", "streamed"), [(True, False), (True, True), (False, False), (False, True)])
async def test_without_a_picker(tmp_path: pathlib.Path, goes_on: bool, streamed: bool) -> None:
    async with echo_pods.echo_pods("pod-0", "pod-1") as pods, aiohttp.ClientSession() as http:
        config = envoy_process.configuration(
            "127.0.0.1:9",
            echo_pods.all_endpoints(pods),
            failure_mode_allow=goes_on,
            processing_mode=STREAMED if streamed else {},
        )
        envoy_process.route_all(config)
        picker = config["static_resources"]["clusters"][0]
        picker["load_assignment"]["endpoints"][0]["lb_endpoints"] = []  # a Service whose selector finds no pod
        async with envoy_process.envoy(tmp_path, config) as url:
            for method in ("POST", "GET"):
                async with http.request(method, url, data=b"{}" if method == "POST" else None) as answer:
                    assert (answer.status == 200) is goes_on, (method, answer.status)
                    assert goes_on or answer.status >= 500


# What must not be possible without the setting


async def test_without_the_setting_no_client_chooses_an_engine(up: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine() as engine,
        fake_engine.engine() as other,
        envoy_process.picking(up, tmp_path, engine, other, dispatch={"rule": "round-robin"}) as (client, url),
    ):
        address = engine.url.removeprefix("http://")
        call = {"model": "fake", "prompt": "x"}
        for _ in range(4):
            async with client.http.post(f"{url}/v1/completions", json=call, headers={SELECTION: address}) as answer:
                assert answer.status == 200
                assert not {SERVED, SELECTED} & {name.lower() for name in answer.headers}
        assert (engine.served, other.served) == (2, 2)
        assert all(SELECTION not in headers for headers in engine.headers + other.headers)
        async with client.http.post(f"{url}/any", data=b"x", headers={SELECTION: address}) as answer:
            assert answer.status == 404


async def test_a_selection_does_not_leave_the_subset_of_the_proxy(up: Any, tmp_path: pathlib.Path) -> None:
    async with echo_pods.echo_pods("pod-0", "pod-1") as pods:
        hint = [pods[0].endpoints[0]]
        async with asking(up, tmp_path, pods, change=lambda config: envoy_process.subset_hint(config, hint)) as (
            envoy,
            _,
        ):
            assert (await envoy.ask(f"{pods[0].ip},{pods[1].ip}"))[1]["pod"] == "pod-0"
            assert (await envoy.ask(pods[1].ip))[0] == 503


async def test_keys_are_asked_for_all_the_same(up: Any, tmp_path: pathlib.Path) -> None:
    keys, key = tmp_path / "keys.yaml", "secret-of-a-caller-0123456789"
    keys.write_text(f"keys: [{{sha256: {hashlib.sha256(key.encode()).hexdigest()}, tenant: shop}}]")
    async with (
        echo_pods.echo_pods("pod-0") as pods,
        asking(up, tmp_path, pods, auth={"keysFile": str(keys)}) as (envoy, _),
    ):
        assert (await envoy.ask())[0] == 401
        status, said, _ = await envoy.ask(headers={"Authorization": f"Bearer {key}"})
        assert (status, key in json.dumps(said)) == (200, False)
