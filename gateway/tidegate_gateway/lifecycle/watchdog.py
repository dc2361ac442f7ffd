"""How long does a call wait for its engine? A time limit on each step, which events of other tasks can cut or extend.

A stream has a step for each block, and nearly all steps end long before their limits. So one timer serves all steps of a
call: a step only writes down its limit, and a timer that fires too early is set again.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidegate_gateway import gateway_settings
from tidegate_gateway.openai import error_table
from tidegate_policy.model import Decision

T = TypeVar("T")

CLOCK_S = 0.001
"""The resolution of the event loop's clock: a timer may fire so much early."""


def first_token_s(timeouts: gateway_settings.Timeouts, decision: Decision) -> float:
    """For the first token of a call, from the instant at which it is sent."""
    return timeouts.first_token_s + 3 * (decision.queue_s + decision.service_s)


def _late(what: str, limit_s: float) -> error_table.EngineTrouble:
    late = f"the engine {what} within {limit_s:.3g} s"
    return error_table.EngineTrouble(late, failure="late", code="engine_timeout")


class Watchdog:
    """The time limits of the steps that one call waits for, one step at a time."""

    def __init__(self) -> None:
        self.latest_at_s: float | None = None
        """On the event loop's clock: `extend_timeout` moves the limit up to this instant; None = not at all."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        """The task that waits for the present step; None between two steps."""
        self._limit_at_s = 0.0
        """The limit of the present step, on the event loop's clock."""
        self._cut = False
        """The present step was cancelled from here."""
        self._timer: asyncio.TimerHandle | None = None
        self._interruption: error_table.GatewayError | None = None

    async def within(self, seconds: float, step: Coroutine[Any, Any, T], what: str, *, of_s: float | None = None) -> T:
        """The result of `step`. Raises the error of an interruption, and `EngineTrouble` when the time is over; its text
        has the limit `of_s`, of which `seconds` are left."""
        task = asyncio.current_task()
        if self._interruption is not None or task is None:
            step.close()
            raise self._interruption or RuntimeError("a step needs a task")
        cancelling = task.cancelling()
        self._task = task
        self._limit(self._loop.time() + seconds)
        try:
            return await step
        except asyncio.CancelledError as error:
            if not self._cut or task.cancelling() > cancelling + 1:
                raise  # the client hung up
            # No name of this frame may have the error, which knows the frame: a cycle would keep all that the call has.
            raise (self._interruption or _late(what, of_s or seconds)) from error
        finally:
            self._task = None
            if self._cut:
                self._cut = False
                task.uncancel()
            del task  # the error of a cancelled task knows this frame too

    def interrupt(self, error: error_table.GatewayError) -> None:
        """Ends the present step, or the next one, with this error."""
        self._interruption = error
        self._end_step()

    def extend_timeout(self, seconds: float) -> None:
        """The engine is seen to work: the present step may take at least so many more seconds."""
        if self._task is None or self._interruption is not None or self._cut or self.latest_at_s is None:
            return
        self._limit(min(max(self._loop.time() + seconds, self._limit_at_s), self.latest_at_s))

    def limit(self, seconds: float) -> None:
        """The present step may take so many more seconds from now, whatever its limit was."""
        if self._task is not None and not self._cut:
            self._limit(self._loop.time() + seconds)

    def reset(self) -> None:
        """Forgets an interruption: the next attempt starts afresh."""
        self._interruption = None
        self.latest_at_s = None

    def close(self) -> None:
        """The call has no further step."""
        self._interruption = None  # its frames know this object
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit(self, at_s: float) -> None:
        """Sets the limit of the present step. A timer that fires earlier stays as it is."""
        self._limit_at_s = at_s
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next step sets a timer
        if self._loop.time() + CLOCK_S < self._limit_at_s:
            self._timer = self._loop.call_at(self._limit_at_s, self._on_timer)
        else:
            self._end_step()

    def _end_step(self) -> None:
        if self._task is not None and not self._cut:
            self._cut = True
            self._task.cancel()
