"""Serves `/healthz`, by which the kubelet checks this process, also while the process waits for the Lease."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(port: int) -> AsyncIterator[None]:
    """Serves `port` on every address while the context is open: the kubelet connects from outside the pod."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()
        yield
    finally:
        await runner.cleanup()
