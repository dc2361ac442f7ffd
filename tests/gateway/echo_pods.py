"""Servers that echo each request, as the pods of the Gateway API Inference Extension's conformance suite do: no engines.

A pod is an address of loopback, and all its ports belong to it.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tidegate_cli import processes


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoPod:
    """One pod, and the requests that it got."""

    name: str
    ip: str
    ports: Sequence[int]
    seen: list[str] = field(default_factory=list)
    """Method and path of each request."""

    @property
    def endpoints(self) -> list[str]:
        return [f"{self.ip}:{port}" for port in self.ports]

    def settings(self) -> list[dict[str, Any]]:
        """The pod as `engines` of a gateway, one for each port."""
        return [{"url": f"http://{endpoint}"} for endpoint in self.endpoints]

    async def echo(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path}")
        sockname = None if request.transport is None else request.transport.get_extra_info("sockname")
        text = {
            "pod": self.name,
            "port": None if sockname is None else sockname[1],
            "method": request.method,
            "path": request.path_qs,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": (await request.read()).decode("latin-1"),
        }
        return web.json_response(text)


@contextlib.asynccontextmanager
async def echo_pods(*names: str, ports: int = 1, first: int = 2) -> AsyncIterator[list[EchoPod]]:
    """A running pod for each name, each with so many ports. The first one has the address 127.0.0.`first`."""
    numbers = [processes.free_port() for _ in range(ports)]
    made = [EchoPod(name=name, ip=f"127.0.0.{first + i}", ports=numbers) for i, name in enumerate(names)]
    async with contextlib.AsyncExitStack() as stack:
        for pod in made:
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.router.add_route("*", "/{path:.*}", pod.echo)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            for port in pod.ports:
                await web.TCPSite(runner, pod.ip, port).start()
        yield made


def all_settings(pods: Sequence[EchoPod]) -> list[dict[str, Any]]:
    """All pods as `engines` of a gateway."""
    return [item for pod in pods for item in pod.settings()]


def all_endpoints(pods: Sequence[EchoPod]) -> list[str]:
    return [endpoint for pod in pods for endpoint in pod.endpoints]
