"""The cost model of an engine, refined by the step times that the engine itself measures (`coefficients`)."""

from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.predict.coefficients import Coefficients

FORGETTING = 0.998
"""Weight of the past at each step: the last 500 steps count."""
FIRST_STEPS = 64
"""Steps before the refined coefficients are used."""
DOUBT = 0.3
"""Relative uncertainty of the first coefficients."""
NOISE = 0.05
"""Error of a measured step time, relative to the largest term of a typical step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step computed, in the terms of `CostModel.step_seconds`."""

    uncached: int = 0
    attended: int = 0
    decodes: int = 0
    context: int = 0


class StepCost:
    """The estimate. `model` is the present cost model."""

    def __init__(self, first: CostModel) -> None:
        self.model = first
        self._coefficients = Coefficients(first, doubt=DOUBT, forgetting=FORGETTING, trusting=FIRST_STEPS)
        self._noise_s = NOISE * self._coefficients.largest

    @property
    def steps(self) -> int:
        """Steps that were learned."""
        return self._coefficients.learned

    @property
    def mean_error(self) -> float:
        """Mean relative error of the latest predictions of step times."""
        return self._coefficients.mean_error

    @property
    def p95_error(self) -> float:
        """95th percentile of the relative errors of the latest predictions of step times."""
        return self._coefficients.p95_error

    def observe(self, work: StepWork, step_s: float) -> None:
        """A step with this work took `step_s` seconds."""
        if step_s <= 0.0:
            return
        terms = (1.0, work.uncached, work.attended, work.decodes, work.context)
        if not self._coefficients.observe(terms, step_s, self._noise_s):
            return
        if self.steps >= FIRST_STEPS and self.steps % 16 == 0:
            self.model = self._coefficients.model()
