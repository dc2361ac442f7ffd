"""TLS of the client ports, with real certificates and handshakes."""

import asyncio
import contextlib
import datetime
import ipaddress
import pathlib
import socket
import ssl
import struct
from typing import Any

import aiohttp
import grpc
import orjson
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

import fake_engine
from tidegate_gateway import gateway_settings
from tidegate_gateway.edge import http_listener, http_messages, listening_port, port_encryption
from tidegate_gateway.settings_decoder import BadSettings
from tidegate_proto.v1 import inference_pb2, inference_pb2_grpc

CALL = {"model": "fake", "prompt": "x", "max_tokens": 2}


def certificate(folder: pathlib.Path, name: str = "gateway", *, rsa_bits: int = 0) -> dict[str, str]:
    """Writes a self-signed certificate of 127.0.0.1 and its key; the settings of `tls`. The key is on an elliptic curve,
    unless `rsa_bits` says otherwise."""
    key = rsa.generate_private_key(65537, rsa_bits) if rsa_bits else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (folder / "tls.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(private)
    return {"certFile": str(folder / "tls.crt"), "keyFile": str(folder / "tls.key"), "reload": "50ms"}


def trusting(tls: dict[str, str]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=tls["certFile"])


async def close(writer: asyncio.StreamWriter) -> None:
    """Closes a connection and waits until its socket is closed."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def shown(url: str) -> str:
    """The name in the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    raw = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    await close(writer)
    return str(x509.load_der_x509_certificate(raw).subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)


async def test_calls_and_streams_pass_over_tls(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    body = {**CALL, "max_tokens": 20}
    async with (
        fake_engine.engine(tokens=20, token_s=0.02) as engine,
        up(engine, store=False, tls=tls, limits={"write": "1s"}) as client,
    ):
        url = client.url.replace("http:", "https:") + "/v1/completions"
        for stream in (False, True, True, False):
            async with client.http.post(url, json={**body, "stream": stream}, ssl=trusting(tls)) as answer:
                assert answer.status == 200
                text = await answer.read()
                assert (
                    text.count(b"data: {") >= 20 if stream else orjson.loads(text)["usage"]["completion_tokens"] == 20
                )
        await asyncio.sleep(1.2)  # a connection that is silent after an answer has lost nothing
        counted = client.gateway.metrics.registry.get_sample_value
        assert counted("tidegate_requests_total", {"outcome": "ok", "class": "none"}) == 4


async def test_connections_in_a_handshake_count(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    async with up(store=False, tls=tls, limits={"connections": 4}) as client:
        host, port = client.url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for reader, _ in silent[:4]:
            assert await asyncio.wait_for(reader.read(), 10) == b"", "it made room for a later one"
        url = client.url.replace("http:", "https:") + "/health"
        async with client.http.get(url, ssl=trusting(tls)) as answer:
            assert answer.status == 200
        for _, writer in silent:
            await close(writer)


async def test_a_client_that_comes_as_the_port_closes_is_answered_over_tls_and_not_in_plain_text(
    tmp_path: pathlib.Path,
) -> None:
    tls = certificate(tmp_path)
    encryption = port_encryption.PortEncryption(gateway_settings.from_mapping({"tls": tls}).tls)

    async def health(request: http_messages.Request) -> http_messages.Response:
        return http_messages.Response(body=b"{}")

    left_s = encryption.expires_at_s - datetime.datetime.now(datetime.UTC).timestamp()
    assert 86000 < left_s <= 86400
    routes = http_listener.Routes([http_listener.Route(method="GET", path="/health", handler=health)])
    server = http_listener.Server(
        routes, gateway_settings.Limits(), leaving=lambda: True, encryption=encryption.context()
    )
    listening = await listening_port.open_port(server, "127.0.0.1", 0)
    host, port = "127.0.0.1", listening.port
    plain_reader, plain = await asyncio.open_connection(host, port)
    plain.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    late = asyncio.create_task(asyncio.open_connection(host, port, ssl=trusting(tls)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(http_listener.close(listening, server))
    reader, writer = await late
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert not (await plain_reader.read()).startswith(b"HTTP")
    await closing
    await close(plain)
    await close(writer)


async def test_grpc_has_the_same_certificate(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials((tmp_path / "tls.crt").read_bytes())
    async with (
        fake_engine.engine() as engine,
        up(engine, store=False, tls=tls, listen={"grpcPort": 0}) as client,
        grpc.aio.secure_channel(client.grpc, credentials) as channel,
    ):
        request = inference_pb2.GenerateRequest(model="fake", prompt="x", max_tokens=2)
        answers = [answer async for answer in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
        assert answers[-1].finished.completion_tokens == 2


async def test_plain_text_gets_no_answer_and_the_port_lives_on(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    async with fake_engine.engine() as engine, up(engine, store=False, tls=tls) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.ask("/v1/completions", **CALL)
        url = client.url.replace("http:", "https:") + "/health"
        async with client.http.get(url, ssl=trusting(tls)) as answer:
            assert answer.status == 200


async def test_new_connections_get_a_renewed_certificate(up: Any, until: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path, "first")
    credentials = grpc.ssl_channel_credentials((tmp_path / "tls.crt").read_bytes())
    request = inference_pb2.GenerateRequest(model="fake", prompt="x", max_tokens=20)
    async with (
        fake_engine.engine(token_s=0.2, tokens=20) as engine,
        up(engine, store=False, tls=tls, listen={"grpcPort": 0}) as client,
        grpc.aio.secure_channel(client.grpc, credentials) as channel,
    ):
        assert await shown(client.url) == await shown(client.grpc) == "first"
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        assert (await stream.read()).accepted.engine
        (tmp_path / "tls.key").write_text("cut off")
        await asyncio.sleep(0.2)
        assert await shown(client.url) == "first", "a certificate that cannot be used changes nothing"
        certificate(tmp_path, "second")

        async def renewed() -> bool:
            return await shown(client.url) == await shown(client.grpc) == "second"

        await until(renewed)
        rest = []
        while (answer := await stream.read()) is not grpc.aio.EOF:
            rest.append(answer)
        assert rest[-1].finished.completion_tokens == 20, "a stream goes on"


async def test_clients_that_end_their_handshakes_early_harm_nobody(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    async with up(store=False, tls=tls, listen={"grpcPort": 0}) as client:
        for address in (client.url.removeprefix("http://"), client.grpc):
            host, port = address.split(":")

            async def churn(host: str = host, port: str = port) -> None:
                for _ in range(40):
                    _, writer = await asyncio.open_connection(host, int(port), ssl=trusting(tls))
                    writer.transport.abort()
                    with socket.create_connection((host, int(port))) as plain:
                        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

            await asyncio.gather(*(churn() for _ in range(10)))
            assert await shown(address) == "gateway"


async def test_a_port_with_tls_that_is_in_use_is_an_error(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    async with up(store=False, tls=tls, listen={"grpcPort": 0}) as client:
        port = int(client.grpc.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="in use"):
            async with up(store=False, tls=tls, listen={"grpcPort": port}):
                pass


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"certFile": "/nowhere/tls.crt"}, "tls.certFile: cannot read /nowhere/tls.crt: No such file"),
        ({"keyFile": __file__}, "must be a certificate chain and its key"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_the_start(
    tmp_path: pathlib.Path, change: dict[str, str], says: str
) -> None:
    settings = gateway_settings.from_mapping({"tls": certificate(tmp_path) | change})
    with pytest.raises(BadSettings, match=says):
        port_encryption.PortEncryption(settings.tls)


def test_one_file_without_the_other_is_an_error() -> None:
    with pytest.raises(BadSettings, match="tls needs both certFile and keyFile"):
        gateway_settings.from_mapping({"tls": {"keyFile": "/etc/tls.key"}})


async def test_a_handshake_that_begins_with_the_connection_is_answered_by_tls(up: Any, tmp_path: pathlib.Path) -> None:
    tls = certificate(tmp_path)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = trusting(tls).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    hello = outgoing.read()

    def first_byte(address: str) -> bytes:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(hello)
            return client.recv(1)

    async with up(store=False, tls=tls, listen={"grpcPort": 0, "extProcPort": 0}) as client:
        for address in (client.url.removeprefix("http://"), client.grpc, client.ext_proc):
            for _ in range(30):
                assert await asyncio.to_thread(first_byte, address) == b"\x16", "a record of the handshake"
