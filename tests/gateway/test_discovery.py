"""Engines behind a name come and go; what their control ports say is shown."""

import asyncio
import contextlib
import socket
from typing import Any

import grpc
import pytest

import fake_engine
from tidegate_gateway import settings_decoder
from tidegate_proto.v1 import control_pb2, control_pb2_grpc


class Names:
    """What the name server answers; no address is an error of its own, as the library of C reports it."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.fails = False

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> list[Any]:
        if not host.startswith("chat-engines"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        if self.fails:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    server = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", server.getaddrinfo)
    return server


async def test_engines_follow_the_addresses_of_a_service(up: Any, until: Any, names: Names) -> None:
    async with fake_engine.engine() as engine:
        port = int(engine.url.rpartition(":")[2])
        service = {"name": "chat-engines.default.svc", "port": port, "nodePool": "a100"}
        async with up(services=[service], health={"resolve": "50ms"}) as client:
            assert (await client.ask())[0] == 503
            names.addresses = ["127.0.0.1", "127.0.0.99"]
            await until(lambda: client.accepting())
            assert (await client.ask())[2]["x-tidegate-engine"] == f"127.0.0.1:{port}"
            assert {shown["node_pool"] for shown in client.state()["engines"]} == {"a100"}
            names.addresses = ["127.0.0.1"]
            await until(lambda: len(list(client.gateway.core.engines)) == 1)
            names.addresses = []
            await asyncio.sleep(0.2)
            assert (await client.ask())[0] == 200, "an answer that the name server takes back for a while still stands"


async def test_the_last_engines_of_a_name_leave_when_they_are_gone(up: Any, until: Any, names: Names) -> None:
    """A node pool that goes to zero: its name has no address any more, and nothing answers where its engine was."""
    names.addresses = ["127.0.0.1"]
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(fake_engine.engine())
        service = {"name": "chat-engines", "port": int(engine.url.rpartition(":")[2])}
        async with up(services=[service], health={"resolve": "50ms", "interval": "50ms"}) as client:
            await until(lambda: client.accepting())
            names.fails = True
            await stack.aclose()
            await until(lambda: not client.accepting())
            assert list(client.gateway.core.engines), "the name server does not answer"
            names.fails, names.addresses = False, []
            await until(lambda: not list(client.gateway.core.engines))
            assert not client.state()["engines"]
            assert (await client.ask())[0] == 503


async def test_an_engine_serves_until_its_successor_has_been_checked(up: Any, until: Any, names: Names) -> None:
    """A pool of one engine that is replaced: between two answers of the name server its only address changes."""
    async with fake_engine.engine() as engine:
        port = int(engine.url.rpartition(":")[2])
        names.addresses = ["127.0.0.1"]
        service, health = {"name": "chat-engines", "port": port}, {"resolve": "50ms", "timeout": "60s"}
        asked = asyncio.Event()

        async def hesitate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        async with up(services=[service], health=health) as client:
            await until(lambda: client.accepting())
            async with await asyncio.start_server(hesitate, "127.0.0.2", port) as successor:
                names.addresses = ["127.0.0.2"]
                await asked.wait()
                for _ in range(5):
                    assert (await client.ask())[0] == 200
                    await asyncio.sleep(0.05)
                successor.close()
            names.addresses = ["127.0.0.3"]  # its health check fails at once
            await until(lambda: [shown["name"] for shown in client.state()["engines"]] == [f"127.0.0.3:{port}"])


async def test_an_engine_that_leaves_finishes_its_calls(up: Any, until: Any, names: Names) -> None:
    async with fake_engine.engine(first_s=0.5) as engine:
        port = int(engine.url.rpartition(":")[2])
        names.addresses = ["127.0.0.1"]
        service = {"name": "chat-engines", "port": port}
        async with up(services=[service], health={"resolve": "50ms"}) as client, asyncio.TaskGroup() as group:
            await until(lambda: client.accepting())
            call = group.create_task(client.ask())
            await until(lambda: engine.running == 1)
            names.addresses = ["127.0.0.99"]
            await until(lambda: [shown["name"] for shown in client.state()["engines"]] == [f"127.0.0.99:{port}"])
            assert (await call)[0] == 200


class Control(control_pb2_grpc.EngineControlServicer):
    async def GetState(self, request: control_pb2.GetStateRequest, context: Any) -> control_pb2.EngineState:
        return control_pb2.EngineState(policy="edf", simulated_profile="a100", fallback_reason="")


async def test_the_state_shows_the_facts_of_the_control_port(up: Any, until: Any) -> None:
    server = grpc.aio.server()
    control_pb2_grpc.add_EngineControlServicer_to_server(Control(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with fake_engine.engine() as engine, fake_engine.engine() as mute:
        known = {"url": engine.url, "control": f"127.0.0.1:{port}"}
        unreachable = {"url": mute.url, "control": "127.0.0.1:1"}
        async with up(known, unreachable) as client:

            def policies() -> list[Any]:
                return [shown["policy"] for shown in client.state()["engines"] if shown["policy"]]

            await until(lambda: policies() == ["edf"])
            assert (await client.ask())[0] == 200
    await server.stop(None)


async def test_a_control_port_that_speaks_nonsense_does_no_harm(up: Any, until: Any) -> None:
    asked = asyncio.Event()

    async def nonsense(request: bytes, context: Any) -> bytes:
        asked.set()
        return b"\xff\xff\xff"

    handler = grpc.unary_unary_rpc_method_handler(nonsense)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("tidegate.v1.EngineControl", {"GetState": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with fake_engine.engine() as engine, up({"url": engine.url, "control": f"127.0.0.1:{port}"}) as client:
        await asked.wait()
        (known,) = client.gateway.discovery.known.values()
        looks = known.checks
        await until(lambda: known.checks > looks + 1)
        assert (await client.ask())[0] == 200
    await server.stop(None)


async def test_an_unknown_profile_stops_the_start_and_is_named(up: Any) -> None:
    engine = {"url": "http://127.0.0.1:1", "profile": "no-such-card"}
    service = {"name": "chat-engines", "profile": "no-such-card"}
    for engines, services in (([engine], []), ([], [service])):
        with pytest.raises(settings_decoder.BadSettings, match="no-such-card"):
            async with up(*engines, services=services):
                pass


async def test_the_log_says_once_why_an_engine_cannot_be_reached_and_again_after_it_was_up(
    up: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        return [message for message in told if message.startswith("engine gpu-0")]

    async with fake_engine.engine(healthy=False) as engine:
        absent = {"name": "gone", "url": "http://127.0.0.1:1"}
        with caplog.at_level("INFO", logger="tidegate.gateway"):
            async with up(
                {"name": "gpu-0", "url": engine.url}, absent, seen=False, model="fake", store=False
            ) as client:
                await asyncio.sleep(0.4)  # several checks
                assert warnings() == [f"engine gpu-0 at {engine.url} says 503 on /health"]
                assert "engine gone at http://127.0.0.1:1 cannot be reached" in caplog.text
                engine.healthy = True
                await until(lambda: len(client.accepting()) == 1)
                assert "engine gpu-0 serves" in caplog.text
                engine.healthy = False
                await until(lambda: len(warnings()) == 2)
