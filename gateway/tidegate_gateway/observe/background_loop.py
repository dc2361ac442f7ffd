"""What happens when a background loop meets an error that its author did not expect? The loop goes on.

Each step of each loop of the gateway runs through `BackgroundLoops.step`: an exception is logged once for each loop
and kind of exception until a step of the loop succeeds, counted in `tidegate_background_errors_total`, and never ends the
process. Cancellation passes. A file that cannot be used is the mistake of a person, so its log entry is a sentence
without a traceback.
"""

import logging
from collections.abc import Awaitable, Callable

from tidegate_gateway import settings_decoder
from tidegate_gateway.observe import prometheus_metrics

logger = logging.getLogger("tidegate.gateway")


class BackgroundLoops:
    """Runs the steps of all background loops of one gateway."""

    def __init__(self, metrics: prometheus_metrics.Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str, type[Exception] | str]] = set()
        """The loop, its subject, and the kind of error."""

    async def step(self, loop: str, work: Callable[[], Awaitable[object]], *, of: str = "") -> bool:
        """Runs one step of the loop of this name; whether it ended without an exception. `of` names its subject,
        where several loops have one name."""
        try:
            await work()
        except settings_decoder.BadSettings as error:
            self._metrics.background_errors.labels(loop).inc()
            sentence = str(error)
            if (loop, of, sentence) not in self._logged:
                self._logged.add((loop, of, sentence))
                logger.error("%s: %s; what was in force stays", loop, sentence)
            return False
        except Exception as error:
            self._metrics.background_errors.labels(loop).inc()
            kind = (loop, of, type(error))
            if kind not in self._logged:
                self._logged.add(kind)
                logger.error(
                    "background loop %s failed and goes on; further errors of this kind are counted, not logged",
                    f"{loop} of {of}" if of else loop,
                    exc_info=error,
                )
            return False
        if self._logged:
            self._logged = {logged for logged in self._logged if logged[:2] != (loop, of)}
        return True
