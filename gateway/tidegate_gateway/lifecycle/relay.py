"""How does the engine's answer reach the client? The second part of a call's life: bytes, time limits, and the end.

A `Relay` sends the call to the engine of its placement, moves it to another engine while no token has come, reads the
answer with a time limit on every token, and settles the call in every case. Cancelling the task (the client hung up)
closes the engine's connection on the way out.
"""

import asyncio
from collections.abc import Callable

from tidegate_gateway import gateway_settings
from tidegate_gateway.lifecycle import admission, engine_client, engine_directory, placement, settlement, watchdog
from tidegate_gateway.openai import engine_body, error_table
from tidegate_policy.dispatch import core_actions

SOONEST_TOKENS, FASTEST_TOKENS_S = 1024, 20_000
"""Tokens that an engine generates of one sequence at once and in each second, at most: it is not believed more."""
PROGRESS_TOKENS = 16
"""Between two reports of a stream's progress to the dispatcher."""


class Relay:
    """The answer to one call, from `begin` to `leave`."""

    def __init__(
        self,
        admitted: admission.AdmittedRequest,
        placed: placement.Placement,
        *,
        client: engine_client.EngineClient,
        directory: engine_directory.EngineDirectory,
        settlement: settlement.Settlement,
        timeouts: gateway_settings.Timeouts,
        traceparent: str | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.record = placed.record
        self._admitted = admitted
        self._placement = placed
        self._client = client
        self._directory = directory
        self._settlement = settlement
        self._timeouts = timeouts
        self._traceparent = traceparent
        self._clock = clock
        self._within = placed.watchdog.within
        self._wall = wall
        self._reply: engine_client.Reply | None = None
        self._report_at_tokens = PROGRESS_TOKENS
        self._loop = asyncio.get_running_loop()
        self._hides_tokens = admitted.request.body.get("include_reasoning") is False
        """The engine sends nothing of what a model thinks, so a stream may be silent for long."""
        self._next_token_s = timeouts.answer_s if self._hides_tokens else timeouts.next_token_s
        self._token_left_s = self._next_token_s
        """For the next token. A client that takes long to read a block takes none of it."""
        self._ended = False

    @property
    def call_id(self) -> str:
        return self._placement.call.id

    @property
    def reply(self) -> engine_client.Reply:
        if self._reply is None:
            raise AssertionError("the answer has not begun")
        return self._reply

    async def next_block(self) -> bytes:
        """The next bytes for the client; b"" at the end. Raises `GatewayError` when the stream fails."""
        reply = self.reply
        if reply.meter.done:
            return b""
        tokens = reply.meter.tokens
        limit_s, began_s = self._next_token_s, self._loop.time()
        try:
            block = await self._within(self._token_left_s, reply.next_block(), "sent no token", of_s=limit_s)
        except error_table.GatewayError as error:
            await self.fail(error)
            raise
        meter = reply.meter
        if meter.tokens != tokens:  # blocks without a token, such as comments, do not count
            self._token_left_s = limit_s
        else:
            self._token_left_s -= self._loop.time() - began_s
        if meter.done:
            await self._complete(reply)
        elif meter.tokens >= self._report_at_tokens:
            self._report_progress(meter.tokens)
        return block

    async def fail(self, error: error_table.GatewayError) -> None:
        """Settles a call whose answer cannot go on, or cannot be read by the one who passes it on."""
        if self._ended and self.reply.meter.failed:
            return  # `_complete` has seen it
        self.record.outcome = self.record.failure = error.code
        if isinstance(error, error_table.EngineTrouble):
            self._placement.report_engine(ok=False, lost=True)
        await self._end(ok=False)

    async def begin(self) -> None:
        """Opens the answer and settles the call if that fails. Raises `GatewayError`."""
        try:
            await self._begin()
        except error_table.GatewayError as error:
            self.record.outcome = error.code
            await self._end(ok=False)
            raise

    async def rest(self) -> None:
        """The client has the answer: waits until the engine ends it too."""
        if self._reply is not None:
            await self._reply.rest()

    def leave(self) -> None:
        """Nothing more is read. A call that has not ended ends here, and its engine sees that."""
        if self._reply is not None:
            self._reply.close()
        if not self._ended:
            self._count()
            self._settlement.cut(self._admitted, self.record)

    async def _begin(self) -> None:
        """Opens the answer; a failure before the first token is tried again at another engine. So is a rejection by an
        engine that has rejected others before, or whose context is shorter than another one's: it stands if no other engine
        answers the call."""
        doubted: tuple[core_actions.Send, engine_client.Reply] | None = None
        while self._reply is None:
            try:
                send = await self._placement.offer
            except error_table.GatewayError:
                if doubted is None:
                    raise
                first, self._reply = doubted
                self.record.engine, self.record.decision = first.decision.engine, first.decision
                break
            self._placement.sent(send)
            try:
                reply = await self._open(self._clock(), send)
            except error_table.EngineTrouble as error:
                self._placement.attempt_failed(error)
                continue
            if doubted is not None:
                self._placement.on_second_opinion(ok=not reply.rejects)
            elif reply.rejects and (doubt := self._placement.doubts_rejection()):
                reply.close()
                doubted = send, reply
                self._placement.attempt_failed(error_table.EngineTrouble(doubt, failure="rejected"))
                continue
            self._reply = reply
        self.record.first_token_at_s = self._clock()
        self._placement.answered(rejects=self._reply.rejects)
        meter = self._reply.meter
        if meter.done:
            await self._complete(self._reply)
        elif meter.tokens >= self._report_at_tokens:
            self._report_progress(meter.tokens)

    async def _open(self, now: float, send: core_actions.Send) -> engine_client.Reply:
        request, decision, timeouts = self._admitted.request, send.decision, self._timeouts
        ask_for_usage = request.stream and request.endpoint.asks_for_usage
        body = engine_body.write(
            now, self._wall(), request.body, send.call, decision.service_s, ask_for_usage=ask_for_usage
        )
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{send.call.id}-{send.attempt}"}
        if self._traceparent:
            headers["traceparent"] = self._traceparent
        opening = self._client.open(self._directory.url(decision.engine), request, body, headers)
        first_s = watchdog.first_token_s(timeouts, decision)
        if request.stream and not self._hides_tokens:
            return await self._within(first_s, opening, "did not begin its answer")
        most_s = max(first_s, timeouts.answer_s)
        latest_at_s = self._loop.time() + most_s
        self._placement.watchdog.latest_at_s = latest_at_s
        try:
            return await self._within(first_s, opening, "did not begin its answer")
        except error_table.EngineTrouble as error:
            if error.code != "engine_timeout" or self._loop.time() < latest_at_s:
                raise
            raise error_table.EngineTrouble(
                f"the engine still worked on the answer after {most_s:.3g} s",
                failure="too-long",
                code=error.code,
                advice="stream it, or ask for fewer tokens",
            ) from error

    def _report_progress(self, tokens: int) -> None:
        self._report_at_tokens = tokens + PROGRESS_TOKENS
        self._placement.progress(tokens)

    async def _complete(self, reply: engine_client.Reply) -> None:
        """Settles a complete answer before its last bytes go out."""
        meter = reply.meter
        self.record.finished_at_s = self._clock()
        self._count()
        ok = not reply.rejects and not meter.failed
        self._placement.finished(ok=ok, rejected=reply.rejects)
        if not ok:
            self.record.outcome = "engine_failed" if meter.failed else "rejected"
            if meter.failed:
                self._placement.report_engine(ok=False, lost=True)
        await self._end(ok=ok)
        if ok:
            self.record.outcome = "ok"

    async def _end(self, *, ok: bool) -> None:
        if not self._ended:
            self._ended = True  # a client that hangs up while the end is recorded has been served
            self._count()
            await self._settlement.ended(self._admitted, self.record, ok=ok)

    def _count(self) -> None:
        """Writes the numbers of the answer into the record."""
        if self._reply is not None:
            meter, record = self._reply.meter, self.record
            told = meter.output_tokens
            if told is not None and record.sent_at_s is not None:
                worked_s = self._clock() - record.sent_at_s
                told = min(told, round(meter.choices * (SOONEST_TOKENS + FASTEST_TOKENS_S * worked_s)))
            record.prompt_tokens, record.output_tokens = meter.prompt_tokens, told
            record.tokens = meter.tokens if told is None else told
            record.tool = meter.tool
