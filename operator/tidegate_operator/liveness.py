"""Serves `/healthz` and `/readyz`, by which the kubelet checks this process, and `/metrics`, also while it waits for the
Lease.

An event loop that is stuck answers neither probe. `/readyz` turns red when the API server has not answered a request for
the Lease for a while, `/healthz` only when it has not for so long that a new process may do better. The ports differ, so
that a NetworkPolicy can admit Prometheus to the metrics alone.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from tidegate_operator import operator_metrics

READY_S, LIVE_S = 30.0, 600.0
"""Longest silence of the API server with which the process is ready, and alive."""


class Pulse:
    """When the API server answered last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic."""
        self._clock = clock
        self._began_at_s = clock()
        self._answered_at_s: float | None = None

    def answered(self) -> None:
        """The API server has answered a request for the Lease."""
        self._answered_at_s = self._clock()

    def check(self, longest_s: float) -> tuple[bool, str]:
        """Whether the API server has answered within that time, and a sentence. A new process has that time too."""
        if self._answered_at_s is None:
            age_s, what = (
                self._clock() - self._began_at_s,
                "has not answered a request for the Lease yet, since the start",
            )
        else:
            age_s, what = self._clock() - self._answered_at_s, "answered a request for the Lease last"
        return age_s <= longest_s, f"the API server {what} {age_s:.0f} s ago"


@contextlib.asynccontextmanager
async def served(
    health_port: int,
    metrics_port: int,
    metrics: operator_metrics.OperatorMetrics,
    pulse: Pulse,
    *,
    ipv6: bool = False,
) -> AsyncIterator[None]:
    """Serves both ports on every address of IPv4, and of IPv6 if wanted, while the context is open: the kubelet connects
    from outside the pod."""

    def probe(longest_s: float) -> Handler:
        async def answer(_: web.Request) -> web.Response:
            is_good, sentence = pulse.check(longest_s)
            return web.Response(text=f"{'ok' if is_good else 'silent'}: {sentence}\n", status=200 if is_good else 503)

        return answer

    async def exposition(request: web.Request) -> web.Response:
        text, content_type = metrics.exposition(request.headers.get("accept", ""))
        return web.Response(body=text, headers={"content-type": content_type})

    host = None if ipv6 else "0.0.0.0"  # None: of IPv6 and of IPv4
    async with (
        _listening(host, health_port, {"/healthz": probe(LIVE_S), "/readyz": probe(READY_S)}),
        _listening(host, metrics_port, {"/metrics": exposition}),
    ):
        yield


@contextlib.asynccontextmanager
async def _listening(host: str | None, port: int, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
