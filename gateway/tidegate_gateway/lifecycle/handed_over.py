"""What becomes of a call whose bytes a proxy carries? The second part of its life, in place of `relay`.

The proxy sends the call to the engine of its placement, and tells when the head of the engine's answer comes and when
the answer ends. It never tells how many tokens came: predictions learn nothing from such a call, and its engine counts
as busy with the whole answer until the end. The proxy, not the gateway, may send the call again.
"""

import asyncio
from collections.abc import Callable

from tidegate_gateway import gateway_settings
from tidegate_gateway.lifecycle import admission, engine_client, engine_directory, placement, settlement, watchdog
from tidegate_gateway.openai import engine_body, error_table
from tidegate_policy.admit import retries
from tidegate_policy.dispatch import core_actions

LONGEST_S = 86_400.0
"""For the rest of an answer after its head: the proxy has the time limits of its bytes."""


class HandedOver:
    """One call at a proxy, from `begin` to `leave`."""

    def __init__(
        self,
        admitted: admission.AdmittedRequest,
        placed: placement.Placement,
        *,
        directory: engine_directory.EngineDirectory,
        settlement: settlement.Settlement,
        timeouts: gateway_settings.Timeouts,
        fallbacks: int,
        traceparent: str | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.record = placed.record
        self.endpoint = ""
        """IP:port of the engine."""
        self.destination = ""
        """The endpoint, and those that the proxy may try after it, with commas between them."""
        self.body = b""
        """The request for the engine."""
        self.headers: dict[str, str] = {}
        """Of the request for the engine."""
        self._admitted = admitted
        self._placement = placed
        self._directory = directory
        self._settlement = settlement
        self._timeouts = timeouts
        self._fallbacks = fallbacks
        self._traceparent = traceparent
        self._clock = clock
        self._wall = wall
        self._status: int | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first_s = 0.0
        self._settled = False

    @property
    def call_id(self) -> str:
        return self._placement.call.id

    @property
    def answered(self) -> bool:
        """The head of the answer is here."""
        return self._status is not None

    async def begin(self) -> None:
        """Waits for an engine, and writes the request for it. Raises `GatewayError`."""
        request = self._admitted.request
        try:
            send = await self._placement.offer
            self._placement.sent(send)
            self.endpoint = self._directory.endpoint(send.decision.engine)
            others = map(self._directory.endpoint, self._placement.fallbacks(self._fallbacks))
            self.destination = ",".join((self.endpoint, *others))
            self.body = self._written(send) if request.raw is None else request.raw
        except error_table.GatewayError as error:
            self.record.outcome = error.code
            await self._settle(ok=False)
            raise
        self.headers["x-request-id"] = f"{send.call.id}-{send.attempt}"
        if self._traceparent:
            self.headers["traceparent"] = self._traceparent
        self._first_s = watchdog.first_token_s(self._timeouts, send.decision)
        if not request.stream:
            self._first_s = max(self._first_s, self._timeouts.answer_s)

    def _written(self, send: core_actions.Send) -> bytes:
        body, service_s = self._admitted.request.body, send.decision.service_s
        return engine_body.write(self._clock(), self._wall(), body, send.call, service_s, ask_for_usage=False)

    async def end(self) -> None:
        """Waits until the proxy tells the end, and settles the call. Raises `GatewayError` if the answer does not begin in
        time, the engine stops, or the call is withdrawn."""
        try:
            await self._placement.watchdog.within(self._first_s, self._wait(), "did not begin its answer")
        except error_table.GatewayError as error:
            if self._status is None:
                self.record.outcome = self.record.failure = error.code
                if isinstance(error, error_table.EngineTrouble):
                    self._placement.report_engine(ok=False)
                await self._settle(ok=False)
            raise
        if self._status is not None:
            await self._ended(self._status)

    async def rest(self) -> None:
        """The proxy has told the end already."""

    def on_head(self, status: int, served: str = "") -> None:
        """The head of the answer is here. `served` is the endpoint that gave it, if the proxy tells. Another one than the
        first of several shows that the first has failed."""
        self._status = status
        if self.destination != self.endpoint and served not in ("", self.endpoint):
            self._placement.report_engine(ok=False)
            for engine in self._directory.engines_at([served]):
                self.record.engine = engine
        self.record.first_token_at_s = self._clock()
        self._placement.answered(rejects=status != 200)
        self._placement.watchdog.limit(LONGEST_S)

    def on_end(self) -> None:
        """The proxy is done with the call, with an answer or without one."""
        if not self._over.done():
            self._over.set_result(None)

    def leave(self) -> None:
        """A call that has not been settled was cut."""
        if not self._settled:
            self._settlement.cut(self._admitted, self.record)

    async def _wait(self) -> None:
        await self._over

    async def _ended(self, status: int) -> None:
        ok, failed = status == 200, engine_client.is_failure(status)
        self.record.finished_at_s = self._clock()
        self._placement.finished(ok=ok, rejected=not (ok or failed or status == 429))
        if not ok:
            self.record.outcome = "engine_failed" if failed else "rejected"
            failure = retries.Failure.BUSY if status in (429, 503) else retries.Failure.FAILED
            if failed and retries.blames_engine(failure):
                self._placement.report_engine(ok=False)
        await self._settle(ok=ok)
        if ok:
            self.record.outcome = "ok"

    async def _settle(self, *, ok: bool) -> None:
        self._settled = True
        await self._settlement.ended(self._admitted, self.record, ok=ok)
