"""Serves `/healthz`, by which the kubelet checks this process, also while the process waits for the Lease, and `/metrics`.

They have a port each, so that a NetworkPolicy can admit Prometheus to the metrics alone.
"""

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from tidegate_operator import operator_metrics


@contextlib.asynccontextmanager
async def served(health_port: int, metrics_port: int, metrics: operator_metrics.OperatorMetrics) -> AsyncIterator[None]:
    """Serves both ports on every address while the context is open: the kubelet connects from outside the pod."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def exposition(request: web.Request) -> web.Response:
        text, content_type = metrics.exposition(request.headers.get("accept", ""))
        return web.Response(body=text, headers={"content-type": content_type})

    async with _listening(health_port, "/healthz", healthz), _listening(metrics_port, "/metrics", exposition):
        yield


@contextlib.asynccontextmanager
async def _listening(port: int, path: str, handler: Handler) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()
        yield
    finally:
        await runner.cleanup()
