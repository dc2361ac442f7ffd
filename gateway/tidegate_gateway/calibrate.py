"""How fast is an engine that came without a profile? Learned from the calls that it has answered.

The time between tokens is a line over the number of calls in the batch (`step_s + decode_s * calls`, RelServe eq 9),
fitted by least squares with forgetting; the prefill rate comes from first tokens of calls that found the engine idle.
Coefficients never turn negative. Engines with a profile are not touched.
"""

from dataclasses import dataclass, replace

from tidegate_policy.cost import CostModel

STARTING = CostModel(step_s=0.02, prefill_s=1e-4, decode_s=2e-4, max_batch=64)
"""A mid-sized card; wrong for most, and soon replaced."""
KEEP = 0.97
"""Weight left to the past by each observation."""
PREFILL_WEIGHT = 0.2
"""Of the newest first token; only calls that were alone show one."""
LEAST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one answered call showed."""

    prompt_tokens: int
    tokens: int
    ttft_s: float | None
    """From sending to the first token; None if the answer was not streamed."""
    whole_s: float
    """From sending to the last token."""
    beside: float
    """Other calls there, on average while it ran."""
    alone: bool
    """It found the engine idle: its first token took no longer than its own prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Weighted sums of the fit, and the model that follows from them."""

    cost: CostModel = STARTING
    weight: float = 1.0
    x: float = 1.0
    xx: float = 1.0
    y: float = STARTING.step_s + STARTING.decode_s
    xy: float = STARTING.step_s + STARTING.decode_s

    def after(self, seen: Observation) -> "Calibration":
        """The calibration with one more call."""
        if seen.tokens < 2 or seen.whole_s <= 0:
            return self
        first_s = seen.ttft_s if seen.ttft_s is not None else self.cost.prefill_seconds(seen.prompt_tokens)
        tpot_s = max((seen.whole_s - first_s) / (seen.tokens - 1), LEAST_S)
        batch = seen.beside + 1
        sums = replace(
            self,
            weight=KEEP * self.weight + 1,
            x=KEEP * self.x + batch,
            xx=KEEP * self.xx + batch * batch,
            y=KEEP * self.y + tpot_s,
            xy=KEEP * self.xy + batch * tpot_s,
        )
        return replace(sums, cost=sums._fitted(seen))

    def _fitted(self, seen: Observation) -> CostModel:
        width = self.weight * self.xx - self.x * self.x
        slope = (self.weight * self.xy - self.x * self.y) / width if width > 1e-3 * self.weight else self.cost.decode_s
        slope = min(max(slope, 0.0), self.y / self.x)
        step_s = max((self.y - slope * self.x) / self.weight, LEAST_S)
        prefill_s = self.cost.prefill_s
        if seen.ttft_s is not None and seen.alone:
            rate_s = max(seen.ttft_s - step_s, 0.0) / max(seen.prompt_tokens, 1)
            prefill_s = max(prefill_s + PREFILL_WEIGHT * (rate_s - prefill_s), 1e-9)
        return replace(self.cost, step_s=step_s, decode_s=slope, prefill_s=prefill_s)
