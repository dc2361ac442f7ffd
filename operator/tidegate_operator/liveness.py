"""Serves `/healthz`, by which the kubelet checks this process, also while the process waits for the Lease, and `/metrics`.

They have a port each, so that a NetworkPolicy can admit Prometheus to the metrics alone.
"""

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from tidegate_operator import operator_metrics


@contextlib.asynccontextmanager
async def served(
    health_port: int, metrics_port: int, metrics: operator_metrics.OperatorMetrics, *, ipv6: bool = False
) -> AsyncIterator[None]:
    """Serves both ports on every address of IPv4, and of IPv6 if wanted, while the context is open: the kubelet connects
    from outside the pod."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def exposition(request: web.Request) -> web.Response:
        text, content_type = metrics.exposition(request.headers.get("accept", ""))
        return web.Response(body=text, headers={"content-type": content_type})

    host = None if ipv6 else "0.0.0.0"  # None: of IPv6 and of IPv4
    async with (
        _listening(host, health_port, "/healthz", healthz),
        _listening(host, metrics_port, "/metrics", exposition),
    ):
        yield


@contextlib.asynccontextmanager
async def _listening(host: str | None, port: int, path: str, handler: Handler) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
