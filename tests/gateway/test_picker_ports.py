"""The ports of an endpoint picker as gateways of the Inference Extension and Kubernetes use them: TLS that nobody verifies
beside plain text, and health checks on a port of their own."""

import asyncio
import contextlib
import pathlib
import ssl
from typing import Any

import envoy_process
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from test_port_encryption import certificate, close, shown

import fake_engine
from tidegate_gateway import gateway_settings
from tidegate_gateway.settings_decoder import BadSettings

CALL = {"model": "fake", "prompt": "x"}
SIGNED = {"selfSigned": True}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def ask(client: Any, url: str) -> int:
    async with client.http.post(f"{url}/v1/completions", json=CALL) as answer:
        await answer.read()
        return int(answer.status)


async def health(address: str, service: str) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


@pytest.mark.parametrize(
    ("sni", "authority"),
    [
        pytest.param("picker.default.svc", None, id="the name of a Service"),
        pytest.param("outbound|9002||picker.default.svc.cluster.local", "outbound|9002||picker.default.svc.cluster.local",
                     id="the name of a cluster of Istio"),
    ],
)  # fmt: skip
async def test_envoy_uses_tls_and_verifies_nothing(
    up: Any, tmp_path: pathlib.Path, sni: str, authority: str | None
) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen={"extProcPort": 0}, picker=SIGNED) as client,
    ):
        config = envoy_process.configuration(client.ext_proc, [engine.url], failure_mode_allow=False)
        envoy_process.tls_to_picker(config, sni=sni)
        if authority is not None:
            envoy_process.filters(config)[0]["typed_config"]["grpc_service"]["envoy_grpc"]["authority"] = authority
        async with envoy_process.envoy(tmp_path, config) as url:
            assert [await ask(client, url) for _ in range(3)] == [200] * 3
            assert all(body["vllm_xargs"] for body in engine.bodies), "the picker has seen them"


async def test_plain_text_stays_possible(up: Any, tmp_path: pathlib.Path) -> None:
    async with (
        fake_engine.engine() as engine,
        envoy_process.picking(up, tmp_path, engine, picker=SIGNED) as (client, url),
    ):
        assert await shown(client.ext_proc) == "tidegate", "TLS"
        assert await ask(client, url) == 200
        assert await health(client.ext_proc, "liveness") == SERVING


async def test_a_client_that_sends_neither_is_cut(up: Any) -> None:
    async with fake_engine.engine() as engine, up(engine, listen={"extProcPort": 0}, picker=SIGNED) as client:
        host, port = client.ext_proc.split(":")
        for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"\x16" + b"\xff" * 64):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                assert b"HTTP/1.1 2" not in await asyncio.wait_for(reader.read(), 10)
            await close(writer)


async def test_a_certificate_of_the_settings_comes_first_and_there_is_no_plain_text(
    up: Any, tmp_path: pathlib.Path
) -> None:
    tls = certificate(tmp_path)
    async with (
        fake_engine.engine() as engine,
        up(engine, store=False, tls=tls, listen={"extProcPort": 0}, picker=SIGNED) as client,
    ):
        assert await shown(client.ext_proc) == "gateway"
        with pytest.raises(grpc.aio.AioRpcError):
            await health(client.ext_proc, "liveness")


async def test_the_certificate_offers_http2_and_is_of_this_start(up: Any) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    found = []
    for _ in range(2):
        async with up(listen={"extProcPort": 0}, picker=SIGNED) as client:
            host, port = client.ext_proc.split(":")
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            connection = writer.get_extra_info("ssl_object")
            assert connection.selected_alpn_protocol() == "h2"
            found.append(connection.getpeercert(binary_form=True))
            await close(writer)
    assert found[0] != found[1]


async def test_probes_of_kubernetes_have_a_port_in_plain_text(up: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, listen={"extProcPort": 0}, picker={**SIGNED, "healthPort": 0}) as client,
    ):
        services = ("", "liveness", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
        for service in services:
            assert await health(client.picker_health, service) == SERVING
        assert await health(client.picker_health, "other") == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        async with grpc.aio.insecure_channel(client.picker_health) as channel:
            process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await process.read()
            assert ended.value.code() is grpc.StatusCode.UNIMPLEMENTED, "it picks nothing"


async def test_a_picker_without_engines_lives_and_is_not_ready(up: Any) -> None:
    async with up(listen={"extProcPort": 0}, picker={"healthPort": 0}) as client:
        assert await health(client.picker_health, "liveness") == SERVING
        assert await health(client.picker_health, "inference-extension") == SERVING
        assert await health(client.picker_health, "readiness") == NOT_SERVING


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"picker": {"conformanceTests": True}}, "picker belongs to the port of an endpoint picker"),
        ({"listen": {"extProcPort": 1}, "picker": {"healthPort": 70_000}}, "picker.healthPort must be from 0 to 65535"),
        ({"inferencePool": {"name": "Not A Name"}}, "is no name of an object"),
        ({"inferencePool": {"name": "a", "apiUrl": "ftp://x"}}, "inferencePool.apiUrl must start with"),
        ({"inferencePool": {"name": "a", "apiUrl": "http://10.0.0.1"}}, "inferencePool.apiUrl must start with"),
        ({"listen": {"extProcPort": 1}, "picker": {"fallbacks": 17}}, "picker.fallbacks must be from 0 to 16"),
    ],
)
def test_settings_that_cannot_be_are_named(document: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSettings, match=says):
        gateway_settings.from_mapping(document)
