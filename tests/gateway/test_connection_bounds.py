"""Connections are bounded, and those that bring no request keep no other client out."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import grpc_peer
import orjson
import pytest

import fake_engine
from tidegate_gateway import gateway_settings, open_files
from tidegate_gateway.edge import client_addresses, http_connection, http_listener

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def connected(stack: contextlib.AsyncExitStack, url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    return reader, writer


async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(HEALTH)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            return (await reader.read(64)).startswith(b"HTTP/1.1 200")
    return False


async def test_connections_without_a_request_make_room_for_new_clients(up: Any) -> None:
    async with up(store=False, limits={"connections": 8}) as client, contextlib.AsyncExitStack() as stack:
        idle = [await connected(stack, client.url) for _ in range(8)]
        for _, writer in idle[4:]:
            writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
        for _ in range(20):
            assert await healthy(*(await connected(stack, client.url)))
        for reader, _ in idle:
            assert await asyncio.wait_for(reader.read(), 10) == b"", "the ones that waited longest were closed"


@pytest.mark.parametrize("before", [b"", HEALTH])
async def test_connections_that_send_their_bodies_slowly_make_room_for_new_clients(up: Any, before: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    async with up(store=False, limits={"connections": 8}) as client, contextlib.AsyncExitStack() as stack:
        slow = [await connected(stack, client.url) for _ in range(8)]
        for _, writer in slow:
            writer.write(before + head + b"{")
        await asyncio.sleep(0.1)
        for _ in range(20):
            assert await healthy(*(await connected(stack, client.url)))
        for reader, _ in slow:
            answer = await asyncio.wait_for(reader.read(), 10)  # to its end: the ones that waited longest were closed
            assert (b"200 OK" in answer) == bool(before)


async def test_connections_with_a_call_are_never_closed_for_new_clients(up: Any, until: Any) -> None:
    body = orjson.dumps({"model": "fake", "prompt": "x"})
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with (
        fake_engine.engine(first_s=2) as engine,
        up(engine, store=False, limits={"connections": 4}) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        calls = [await connected(stack, client.url) for _ in range(4)]
        for _, writer in calls:
            writer.write(request)
        await until(lambda: engine.running == 4)
        assert not await healthy(*(await connected(stack, client.url))), "no connection can be closed for it"
        for reader, _ in calls:
            assert (await reader.read(64)).startswith(b"HTTP/1.1 200")


async def test_health_answers_on_the_metrics_port_while_the_client_port_is_full(up: Any) -> None:
    async with (
        up(store=False, listen={"metricsPort": 0}, limits={"connections": 4}) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(4):
            _, writer = await connected(stack, client.url)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await asyncio.sleep(0)
        assert await healthy(*(await connected(stack, client.probe_url)))


@pytest.mark.parametrize(("address", "local"), [("127.0.0.1", True), ("::1", True), ("10.0.0.7", False)])
async def test_one_address_has_a_bound_of_its_own_unless_it_is_this_machine(address: str, local: bool) -> None:
    limits = gateway_settings.Limits(connections=100, connections_per_address=3)
    server = http_listener.Server(http_listener.Routes([]), limits, leaving=lambda: False)
    opened = []
    for _ in range(5):
        connection = http_connection.Connection(server)
        connection.address = address
        opened.append(server.opened(connection))
    assert opened == ([True] * 5 if local else [True] * 3 + [False] * 2)
    for connection in list(server.connections):
        server.closed(connection)
    assert not server.unoccupied


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::1", 1, 0, 0), "::1"),
        (("::ffff:127.0.0.1", 1, 0, 0), "127.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (None, ""),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(peer: Any, counted: str) -> None:
    class Transport(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return peer

    assert client_addresses.address_of(Transport()) == counted


@pytest.mark.parametrize(("address", "local"), [("::1", True), ("2001:db8:1:2::/64", False)])
def test_over_grpc_one_address_has_a_bound_of_its_own_too(address: str, local: bool) -> None:
    addresses = client_addresses.ClientAddresses(3)
    opened = []
    for _ in range(5):
        opened.append(addresses.has_room(address))
        addresses.opened(address)
    assert opened == ([True] * 5 if local else [True] * 3 + [False] * 2)
    for _ in range(3):
        addresses.closed(address)
    assert addresses.has_room(address)


async def test_admin_and_metrics_answer_while_the_client_ports_are_full(up: Any) -> None:
    async with (
        fake_engine.engine() as engine,
        up(engine, store=False, listen={"metricsPort": 0}, limits={"connections": 4}) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(8):
            await connected(stack, client.url)
        for url in (client.admin_url + "/admin/state", client.probe_url + "/health"):
            async with client.http.get(url) as response:
                assert response.status == 200


async def test_a_client_that_hangs_up_behind_a_pipelined_request_is_noticed(up: Any, until: Any, figure: Any) -> None:
    body = orjson.dumps({"model": "fake", "prompt": "x"})
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with fake_engine.engine(first_s=60) as engine, up(engine, store=False) as client:
        async with contextlib.AsyncExitStack() as stack:
            _, writer = await connected(stack, client.url)
            writer.write(request * 3)
            await until(lambda: engine.running == 1)
        left_at_s = time.monotonic()
        await until(lambda: engine.running == 0, within_s=40)  # the engine itself would take 60
        noticed_s = time.monotonic() - left_at_s
    figure(
        "seconds until the hang-up of a client behind pipelined requests is noticed",
        f"{noticed_s:.1f}",
        goal="5",
        met=noticed_s <= 5,
    )


async def test_grpc_connections_are_bounded(up: Any) -> None:
    async with (
        up(store=False, listen={"grpcPort": 0}, limits={"connections": 3}) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        peers = []
        for _ in range(6):
            peers.append(await stack.enter_async_context(grpc_peer.connected(client.grpc)))
            await peers[-1].read()
        for peer in peers[:3]:
            assert await peer.is_cut(), "connections without a call made room"
        for peer in peers[3:]:
            number = peer.open(grpc_peer.CHECK, message=grpc_peer.message(b""), ends=True)
            assert (await peer.ended(number)).head["grpc-status"] == "0"


def test_few_open_files_lower_the_bound_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    settings = gateway_settings.Settings()
    assert open_files.within(settings, 1_000_000) is settings
    with caplog.at_level(logging.WARNING):
        assert open_files.within(settings, 1024).limits.connections == 384
    assert "limits.connections is 10000, and 1024 open files suffice for 384" in caplog.text
    assert open_files.within(settings, 10).limits.connections == 1
