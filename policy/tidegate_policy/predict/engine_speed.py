"""How fast is an engine without a cost profile? Learned from the calls that it answered.

The time between tokens is a line over the number of calls in the batch (`step_s + decode_s * calls`, RelServe eq 9). Least
squares with forgetting fit the line. The prefill rate comes from the first tokens of calls that found the engine idle.
Coefficients are never negative. An engine with a profile keeps its profile.
"""

from dataclasses import dataclass, replace

from tidegate_policy.cost import CostModel

STARTING = CostModel(step_s=0.02, prefill_s=1e-4, decode_s=2e-4, max_batch=64)
"""A mid-sized card. The first answers replace it."""
KEEP = 0.97
"""Weight that the past keeps after each observation."""
PREFILL_WEIGHT = 0.2
"""Weight of the newest first token; only a call that found the engine idle shows the prefill rate."""
LEAST_S = 1e-6
MOST_S = 3600.0
"""Longest time between tokens, or to a first token, that is taken for a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedObservation:
    """What one answered call showed of its engine."""

    prompt_tokens: int
    tokens: int
    """Output tokens of each sequence."""
    ttft_s: float | None
    """Seconds from sending the call to its first token; None if the answer was not streamed."""
    whole_s: float
    """Seconds from sending the call to its last token."""
    neighbours: float
    """Mean number of other calls on the engine while the call ran."""
    found_idle: bool
    """The engine had no other call, so the first token took no longer than the call's own prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """The weighted sums of the fit, and the cost model that follows from them."""

    cost: CostModel = STARTING
    weight: float = 1.0
    x: float = 1.0
    xx: float = 1.0
    y: float = STARTING.step_s + STARTING.decode_s
    xy: float = STARTING.step_s + STARTING.decode_s

    def predict(self) -> CostModel:
        """The engine's cost model as far as its answers have shown it."""
        return self.cost

    def observe(self, seen: SpeedObservation) -> "EngineSpeed":
        """The fit with one more call. An observation without at least two tokens or with an impossible time is ignored."""
        if seen.tokens < 2 or not 0 < seen.whole_s <= MOST_S * seen.tokens:
            return self
        first_s = seen.ttft_s if seen.ttft_s is not None else self.cost.prefill_seconds(seen.prompt_tokens)
        tpot_s = max((seen.whole_s - first_s) / (seen.tokens - 1), LEAST_S)
        batch = seen.neighbours + 1
        sums = replace(
            self,
            weight=KEEP * self.weight + 1,
            x=KEEP * self.x + batch,
            xx=KEEP * self.xx + batch * batch,
            y=KEEP * self.y + tpot_s,
            xy=KEEP * self.xy + batch * tpot_s,
        )
        return replace(sums, cost=sums._fitted(seen))

    def _fitted(self, seen: SpeedObservation) -> CostModel:
        width = self.weight * self.xx - self.x * self.x
        slope = (self.weight * self.xy - self.x * self.y) / width if width > 1e-3 * self.weight else self.cost.decode_s
        slope = min(max(slope, 0.0), self.y / self.x)
        step_s = max((self.y - slope * self.x) / self.weight, LEAST_S)
        prefill_s = self.cost.prefill_s
        if seen.ttft_s is not None and seen.found_idle:
            rate_s = max(seen.ttft_s - step_s, 0.0) / max(seen.prompt_tokens, 1)
            prefill_s = max(prefill_s + PREFILL_WEIGHT * (rate_s - prefill_s), 1e-9)
        return replace(self.cost, step_s=step_s, decode_s=slope, prefill_s=prefill_s)
