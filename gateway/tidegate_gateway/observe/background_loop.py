"""What happens when a background loop meets an error that its author did not expect? The loop goes on.

Each step of each loop of the gateway runs through `BackgroundLoops.step`: an exception is logged once for each loop
and kind of exception, counted in `tidegate_background_errors_total`, and never ends the process. Cancellation passes.
"""

import logging
from collections.abc import Awaitable, Callable

from tidegate_gateway.observe import prometheus_metrics

logger = logging.getLogger("tidegate.gateway")


class BackgroundLoops:
    """Runs the steps of all background loops of one gateway."""

    def __init__(self, metrics: prometheus_metrics.Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, type[Exception]]] = set()

    async def step(self, loop: str, work: Callable[[], Awaitable[object]]) -> bool:
        """Runs one step of the loop of this name; whether it ended without an exception."""
        try:
            await work()
        except Exception as error:
            self._metrics.background_errors.labels(loop).inc()
            kind = (loop, type(error))
            if kind not in self._logged:
                self._logged.add(kind)
                logger.error(
                    "background loop %s failed and goes on; further errors of this kind are counted, not logged",
                    loop,
                    exc_info=error,
                )
            return False
        return True
