"""Ports on addresses of IPv6, and engines at such addresses."""

import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import fake_engine
from tidegate_cli import processes

EVERYWHERE = "::"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no addresses of IPv6")


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
async def test_every_port_takes_both_kinds_of_addresses(up: Any, address: str) -> None:
    names = ("port", "grpcPort", "adminPort", "metricsPort", "extProcPort")
    ports = {name: processes.free_port() for name in names}
    hosts = {"host": EVERYWHERE, "adminHost": EVERYWHERE, "metricsHost": EVERYWHERE}
    auth = {"allowUnauthenticated": True}
    async with (
        fake_engine.engine(host="::1") as engine,
        up(engine, listen={**ports, **hosts}, auth=auth) as client,
    ):
        url, body = f"http://{address}:{ports['port']}", {"model": "fake", "prompt": "x"}
        async with client.http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-tidegate-engine"] == engine.url.removeprefix("http://")
        for name, path in (("adminPort", "/admin/state"), ("metricsPort", "/metrics")):
            async with client.http.get(f"http://{address}:{ports[name]}{path}") as response:
                assert response.status == 200
        for name in ("grpcPort", "extProcPort"):
            async with grpc.aio.insecure_channel(f"{address}:{ports[name]}") as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert answer.status != health_pb2.HealthCheckResponse.UNKNOWN
