"""How long does a call wait for its engine? A time limit on each step, which events of other tasks can cut or extend."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidegate_gateway.openai import error_table

T = TypeVar("T")


class Watchdog:
    """The time limit of the step that one call waits for."""

    def __init__(self) -> None:
        self.latest_at_s: float | None = None
        """On the event loop's clock: `extend_timeout` moves the limit up to this instant; None = not at all."""
        self._timer: asyncio.Timeout | None = None
        self._interruption: error_table.GatewayError | None = None

    async def within(self, seconds: float, step: Coroutine[Any, Any, T], what: str) -> T:
        """The result of `step`. Raises the error of an interruption, and `EngineTrouble` when the time is over."""
        if self._interruption is not None:
            step.close()
            raise self._interruption
        try:
            async with asyncio.timeout(seconds) as self._timer:
                return await step
        except TimeoutError as error:
            late = error_table.EngineTrouble(f"the engine {what} within {seconds:.3g} s", code="engine_timeout")
            raise (self._interruption or late) from error
        finally:
            self._timer = None

    def interrupt(self, error: error_table.GatewayError) -> None:
        """Ends the present step, or the next one, with this error."""
        self._interruption = error
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    def extend_timeout(self, seconds: float) -> None:
        """The engine is seen to work: the present step may take at least so many more seconds."""
        if self._timer is None or self._interruption is not None or self._timer.expired() or self.latest_at_s is None:
            return
        extended_at_s = asyncio.get_running_loop().time() + seconds
        self._timer.reschedule(min(max(extended_at_s, self._timer.when() or 0.0), self.latest_at_s))

    def reset(self) -> None:
        """Forgets an interruption: the next attempt starts afresh."""
        self._interruption = None
        self.latest_at_s = None
