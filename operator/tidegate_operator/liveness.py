"""Serves `/healthz` and `/readyz`, by which the kubelet checks this process, and `/metrics`, also while it waits for the
Lease.

An event loop that is stuck answers neither probe. `/readyz` turns red when the API server has not granted a request for
the Lease for a while, `/healthz` only when it has not answered any for so long that a new process may do better. An error
such as 403 or 429 is an answer: a new process would get it too. The ports differ, so that a NetworkPolicy can admit
Prometheus to the metrics alone.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from tidegate_operator import operator_metrics

READY_S, LIVE_S = 30.0, 600.0
"""Longest silence of the API server with which the process is ready, and alive."""


class Pulse:
    """When the API server answered last, and how."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic."""
        self._clock = clock
        self._began_at_s = clock()
        self._granted_at_s: float | None = None
        self._failed: tuple[float, int] | None = None
        """Instant and HTTP status of the last error."""

    def answered(self, error: int | None = None) -> None:
        """The API server has answered a request for the Lease, if so with this HTTP status of an error."""
        if error is None:
            self._granted_at_s, self._failed = self._clock(), None
        else:
            self._failed = self._clock(), error

    def check(self, longest_s: float, *, with_errors: bool) -> tuple[bool, str]:
        """Whether the API server has answered within that time, and a sentence. `with_errors` counts answers that are
        errors too. A new process has that time too."""
        now_s = self._clock()
        if self._granted_at_s is None:
            age_s, what = now_s - self._began_at_s, "has not granted a request for the Lease yet, since the start"
        else:
            age_s, what = now_s - self._granted_at_s, "granted a request for the Lease last"
        sentence = f"the API server {what} {age_s:.0f} s ago"
        if self._failed is not None:
            failed_at_s, status = self._failed
            sentence += f", and answered one with HTTP status {status} {now_s - failed_at_s:.0f} s ago"
            age_s = now_s - failed_at_s if with_errors else age_s
        return age_s <= longest_s, sentence


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

    def probe(longest_s: float, *, with_errors: bool) -> Handler:
        async def answer(_: web.Request) -> web.Response:
            is_good, sentence = pulse.check(longest_s, with_errors=with_errors)
            return web.Response(text=f"{'ok' if is_good else 'silent'}: {sentence}\n", status=200 if is_good else 503)

        return answer

    async def exposition(request: web.Request) -> web.Response:
        text, content_type = metrics.exposition(request.headers.get("accept", ""))
        return web.Response(body=text, headers={"content-type": content_type})

    probes = {"/healthz": probe(LIVE_S, with_errors=True), "/readyz": probe(READY_S, with_errors=False)}
    host = None if ipv6 else "0.0.0.0"  # None: of IPv6 and of IPv4
    async with (
        _listening(host, health_port, probes),
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
