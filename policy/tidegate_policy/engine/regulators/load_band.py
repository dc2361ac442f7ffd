"""`load-band`: two loops keep the load of an engine inside a band (H-MAS Appendix E.2, Algorithm 2).

The load is the step time over the tightest time-per-output-token target among the calls that decode. The error is the
distance of the load from the band. The inner loop is proportional: it lowers the tokens of a step at once. The outer loop
is integral: it lowers the calls that run together when the mean error persists. Both stay within the bounds of the
operator, and each is projected onto them at every step, so neither winds up while a bound holds it. Steps that they did not
plan, as in a bypass, make them begin anew.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import ClassVar

from tidegate_policy.engine.snapshot import EngineSnapshot
from tidegate_policy.engine.step import StepFacts, StepPlan


@dataclass(slots=True, kw_only=True)
class LoadBand:
    """The regulator. Gains are shares of the engine's limit for each unit of error."""

    SAFETY: ClassVar[bool] = False
    low: float = 0.6
    high: float = 0.9
    token_gain: float = 0.2
    running_gain: float = 0.02
    window_steps: int = 32
    """Steps over which the outer loop averages the error."""
    least_share: float = 1 / 16
    """Neither loop goes below this share of the engine's limit."""
    most_error: float = 2.0
    """An error beyond this counts as this, so one long step cannot close the engine."""
    _errors: deque[float] = field(default_factory=deque)
    _error: float = 0.0
    _planned: bool = False
    """Whether it planned a step since the last one that ended."""
    _fresh: bool = False
    """Whether a step ended since the last plan."""
    _target_s: float | None = None
    """The tightest target when the step that runs was planned."""
    _tokens: float = math.inf
    _running: float = math.inf

    def observe(self, facts: StepFacts) -> None:
        if not facts.step_s:
            return
        planned, self._planned = self._planned, False
        if not planned:
            self._begin_anew()
            return
        load = self.low if self._target_s is None else facts.step_s / self._target_s
        error = load - min(max(load, self.low), self.high)
        self._error = max(min(error, self.most_error), -self.most_error)
        self._errors.append(self._error)
        if len(self._errors) > self.window_steps:
            self._errors.popleft()
        self._fresh = True

    def _begin_anew(self) -> None:
        self._errors.clear()
        self._fresh = False
        self._tokens = self._running = math.inf

    def shape(self, engine: EngineSnapshot, plan: StepPlan) -> StepPlan:
        self._planned = True
        targets = engine.with_target
        self._target_s = min(target_s for _, target_s in targets) if targets else None
        limits = engine.limits
        fresh, self._fresh = self._fresh, False
        if self._target_s is None:  # nothing to protect: the bounds are the operator's
            self._tokens, self._running = plan.max_step_tokens, plan.max_running
            self._errors.clear()
            return plan
        if fresh:
            self._tokens -= self.token_gain * self._error * limits.max_step_tokens
            self._running -= self.running_gain * fmean(self._errors) * limits.max_running
        self._tokens = min(max(self._tokens, self.least_share * limits.max_step_tokens), plan.max_step_tokens)
        self._running = min(max(self._running, self.least_share * limits.max_running), plan.max_running)
        return replace(plan, max_step_tokens=round(self._tokens), max_running=max(round(self._running), 1))
