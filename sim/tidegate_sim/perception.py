"""A model of per-call predictors: how far their answers are from the truth, and how long they take.

A paper's predictor of urgency or output length reads the prompt. Traces have no prompts, so the model starts from
the true value and adds an error. The error of a call depends on the seed and the call's id alone, so that all rows of a
table see the same predictions.
"""

import random
from dataclasses import dataclass, replace

from tidegate_policy.model import LEAST_URGENT, MOST_URGENT
from tidegate_sim.trace_format import TraceCall

MOST_OUTPUT_TOKENS = 500
"""The longest output to which a length error is relative (Semantic Scheduling, section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perception:
    """What the predictors know. An error of `e` means that a share `e` of the calls is mispredicted, and that the mean
    distance of these predictions from the truth is `e` of the range (Semantic Scheduling, section 4.1)."""

    length_error: float = 0.0
    urgency_error: float = 0.0
    latency_s: float = 0.0
    """Seconds of one prediction. One predictor serves the calls one after the other, as they arrive."""


CLAIRVOYANT = Perception()


class Perceiver:
    """The predictors of one cell."""

    def __init__(self, settings: Perception | None, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._free_at_s = 0.0

    def delay_s(self, now: float) -> float:
        """Seconds from the arrival of a call to its prediction."""
        if self._settings is None or not self._settings.latency_s:
            return 0.0
        self._free_at_s = max(self._free_at_s, now) + self._settings.latency_s
        return self._free_at_s - now

    def seen(self, call: TraceCall) -> TraceCall:
        """The call as the predictors see it."""
        settings = self._settings
        if settings is None or not (settings.length_error or settings.urgency_error):
            return call
        rng = random.Random(f"{self._seed} {call.id}")
        tokens, urgency = call.output_tokens, call.urgency
        if rng.random() < settings.length_error:
            tokens = tokens + round(_signed(rng, settings.length_error) * MOST_OUTPUT_TOKENS)
            tokens = min(max(tokens, 1), MOST_OUTPUT_TOKENS)
        if urgency is not None and rng.random() < settings.urgency_error:
            levels = LEAST_URGENT - MOST_URGENT + 1
            urgency = urgency + round(_signed(rng, settings.urgency_error) * levels)
            urgency = min(max(urgency, MOST_URGENT), LEAST_URGENT)
        return replace(call, output_tokens=tokens, urgency=urgency)


def _signed(rng: random.Random, mean: float) -> float:
    """A distance with this mean, in either direction."""
    return rng.uniform(0, 2 * mean) * rng.choice((-1, 1))
