"""Engines that are the pods of an InferencePool. The API server here is a double; tests/operator has a real one."""

import contextlib
import pathlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import echo_pods
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate_gateway import gateway_settings, picker_settings
from tidegate_gateway.engines import inference_pool
from tidegate_gateway.settings_decoder import BadSettings

POOL = "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}"
PODS = "/api/v1/namespaces/{namespace}/pods"


def pool(*ports: int) -> dict[str, Any]:
    numbers = [{"number": port} for port in ports]
    return {"spec": {"selector": {"matchLabels": {"app": "server", "tier": "gpu"}}, "targetPorts": numbers}}


def pod(ip: str | None, *, ready: bool = True, leaving: bool = False, active: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": f"pod-{ip}"}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    if active is not None:
        metadata["annotations"] = {inference_pool.ACTIVE_PORTS: active}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "status": {"conditions": conditions, **({} if ip is None else {"podIP": ip})}}


def test_each_ready_pod_is_an_engine_at_each_port() -> None:
    found = inference_pool.endpoints(pool(3000, 3002), [pod("10.0.0.2"), pod("10.0.0.1"), pod("fd00::1")])
    assert found == [
        "10.0.0.1:3000", "10.0.0.1:3002", "10.0.0.2:3000", "10.0.0.2:3002", "[fd00::1]:3000", "[fd00::1]:3002",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        pod("10.0.0.1", ready=False),
        pod("10.0.0.1", leaving=True),
        pod(None),
        {"metadata": {"name": "new"}},
        pod("10.0.0.1", active="9"),
    ],
)
def test_a_pod_that_takes_no_calls_is_no_engine(other: dict[str, Any]) -> None:
    assert inference_pool.endpoints(pool(3000), [other, pod("10.0.0.2")]) == ["10.0.0.2:3000"]


def test_a_pod_may_serve_some_of_the_ports() -> None:
    assert inference_pool.endpoints(pool(1, 2, 3), [pod("10.0.0.1", active=" 3, 1,9")]) == ["10.0.0.1:1", "10.0.0.1:3"]


def test_the_labels_select_the_pods() -> None:
    assert inference_pool.selector(pool(1)) == "app=server,tier=gpu"


def test_the_api_server_is_that_of_the_own_cluster() -> None:
    there = {"KUBERNETES_SERVICE_HOST": "10.1.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    settings = gateway_settings.from_mapping({"inferencePool": {"name": "a"}})
    assert gateway_settings.from_environment(settings, there).inference_pool.api_url == "https://10.1.0.1:6443"
    six = {**there, "KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert gateway_settings.from_environment(settings, six).inference_pool.api_url == "https://[fd00::1]:6443"
    named = picker_settings.InferencePool(name="a", api_url="https://x")
    assert picker_settings.placed(named, there).api_url == "https://x"


async def test_an_api_server_is_needed(up: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadSettings, match=r"inferencePool\.apiUrl is required outside a cluster"):
        async with up(inferencePool={"name": "a"}):
            pass
    with pytest.raises(BadSettings, match=r"inferencePool\.caFile cannot be used"):
        async with up(inferencePool={"name": "a", "apiUrl": "https://x", "caFile": str(tmp_path / "none")}):
            pass


@dataclass(slots=True, kw_only=True)
class ApiServer:
    """The part of an API server that tells pods; tests change it while it runs."""

    pool: dict[str, Any] | None
    pods: Any
    token: str = "first"
    status: int = 200
    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    """The queries for pods."""

    async def tell_pool(self, request: web.Request) -> web.Response:
        self._check(request)
        if self.pool is None or request.match_info["name"] != "mine":
            raise web.HTTPNotFound
        return web.json_response(self.pool)

    async def tell_pods(self, request: web.Request) -> web.Response:
        self._check(request)
        self.asked.append(dict(request.query))
        return web.json_response({"items": self.pods})

    def _check(self, request: web.Request) -> None:
        if self.status != 200:
            raise web.HTTPServiceUnavailable
        if request.match_info["namespace"] != "models" or request.headers["Authorization"] != f"Bearer {self.token}":
            raise web.HTTPForbidden


@contextlib.asynccontextmanager
async def api_server(told: dict[str, Any] | None, pods: Any) -> AsyncIterator[ApiServer]:
    server, app = ApiServer(pool=told, pods=pods), web.Application()
    app.router.add_get(POOL, server.tell_pool)
    app.router.add_get(PODS, server.tell_pods)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


async def test_the_engines_follow_the_pool(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with (
        echo_pods.echo_pods("pod-0", "pod-1", ports=2) as pods,
        api_server(pool(pods[0].ports[0]), [pod(pods[0].ip)]) as server,
        up(
            listen={"extProcPort": 0},
            picker={"conformanceTests": True, "healthPort": 0},
            inferencePool={"name": "mine", "namespace": "models", "apiUrl": server.url, "tokenFile": str(token)},
            health={"resolve": "50ms"},
        ) as client,
    ):

        async def known() -> Any:
            async with grpc.aio.insecure_channel(client.picker_health) as channel:
                request = health_pb2.HealthCheckRequest(service="inference-extension")
                return (await health_pb2_grpc.HealthStub(channel).Check(request)).status

        async def serve(*endpoints: str) -> None:
            await until(lambda: sorted(client.accepting()) == sorted(endpoints))

        await serve(pods[0].endpoints[0])
        assert server.asked[-1] == {"labelSelector": "app=server,tier=gpu", "resourceVersion": "0"}
        server.pods = [pod(each.ip) for each in pods]
        await serve(pods[0].endpoints[0], pods[1].endpoints[0])
        server.pool = pool(*pods[0].ports)
        await serve(*echo_pods.all_endpoints(pods))
        assert await known() == health_pb2.HealthCheckResponse.SERVING
        server.pods = [pod(pods[0].ip, ready=False), pod(pods[1].ip)]
        await serve(*pods[1].endpoints)

        server.token = "second"
        asked = len(server.asked)
        server.pods = "no list"
        token.write_text("second")
        await until(lambda: len(server.asked) > asked + 2)
        await serve(*pods[1].endpoints)  # the last answer stands
        server.status = 503
        server.pods = [pod(each.ip) for each in pods]
        await serve(*pods[1].endpoints)
        server.status = 200
        await serve(*echo_pods.all_endpoints(pods))

        server.pool = None
        await serve()
        assert await known() == health_pb2.HealthCheckResponse.NOT_SERVING
