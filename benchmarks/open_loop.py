"""How long does an answer take when requests come at a given rate, whether earlier ones are answered or not?

The requests of an open loop come at random instants (a Poisson process). Each goes out on a connection that has no request,
or on a new one, so no request waits for the answer to another one in the client. The latency is the time from the write to
the last byte of the answer. The event loop wakes up at whole milliseconds, so requests come in small bursts; the direct
path to the engine, with which `gateway_cpu` compares, gets the same.
"""

import asyncio
import random
import time
from typing import cast

import gateway_load
import httptools

LATE_S = 30.0
"""For the last answers."""


class _Connection(asyncio.Protocol):
    """Carries one request at a time, and notes how long its answer takes."""

    def __init__(self, loop: "_OpenLoop") -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sent_at_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._loop.answered(self, time.perf_counter() - self._sent_at_s, self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        self._loop.lost(self)

    def send(self, request: bytes, at_s: float) -> None:
        self._sent_at_s = at_s
        if self._transport is not None:
            self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _OpenLoop:
    """The connections of one run, and the latencies so far."""

    def __init__(self, port: int, request: bytes) -> None:
        self.latencies_s: list[float] = []
        self._port = port
        self._request = request
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._under_way = 0
        self._over = False
        self._done = asyncio.Event()

    async def run(self, rate: float, seconds: float, connections: int, rng: random.Random) -> None:
        for _ in range(connections):
            self._idle.append(await self._connected())
        loop = asyncio.get_running_loop()
        opening: set[asyncio.Task[None]] = set()
        at_s = loop.time()
        end_s = at_s + seconds
        while (at_s := at_s + rng.expovariate(rate)) < end_s:
            if at_s > loop.time():
                await asyncio.sleep(at_s - loop.time())
            self._under_way += 1
            if self._idle:
                self._idle.pop().send(self._request, time.perf_counter())
            else:
                opening.add(asyncio.create_task(self._send_on_a_new_one(time.perf_counter())))
        self._over = True
        if self._under_way:
            async with asyncio.timeout(LATE_S):
                await self._done.wait()
        for connection in list(self._connections):
            connection.close()

    def answered(self, connection: _Connection, took_s: float, status: int) -> None:
        if status != 200:
            raise SystemExit(f"benchmark of the gateway: an answer has the status {status}")
        self.latencies_s.append(took_s)
        self._idle.append(connection)
        self._under_way -= 1
        if self._over and not self._under_way:
            self._done.set()

    def lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _send_on_a_new_one(self, at_s: float) -> None:
        (await self._connected()).send(self._request, at_s)

    async def _connected(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), "127.0.0.1", self._port
        )
        self._connections.add(connection)
        return connection


async def latencies_s(
    port: int, mode: str, prompt_bytes: int, *, rate: float, seconds: float, connections: int, seed: int
) -> list[float]:
    """The latency of each request of an open loop, which begins with so many connections. Raises `TimeoutError` if answers
    are missing long after the last request."""
    run = _OpenLoop(port, gateway_load.message(mode, prompt_bytes))
    await run.run(rate, seconds, connections, random.Random(seed))
    return run.latencies_s
