"""The selector `bandit`: learns for each level of pressure which policy meets the most targets (H-MAS C.2).

The reward of a window is the number of its met targets over its demand, which is the greater of the calls that came and
the calls with a target that finished. It belongs to the policy that was active in the window, at the level of the window
before it. A policy that was taken back within the window, and is banned since, gets the reward too, so its failure is
remembered. The proposal is the policy with the highest upper confidence bound (UCB1). The rules' choice starts
with `PRIOR` windows of its credit, so the bandit begins as `rules` and departs from them by evidence. Exploration has no
randomness, happens only while calls wait, and passes the same guards as every proposal.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tidegate_policy.qos import Qos
from tidegate_policy.steer import features, rules
from tidegate_policy.steer.proposal import Memory, Proposal

LEVELS_S = (4.0, 20.0)
"""Waits that separate the levels of pressure."""
PRIOR = 6.0
"""Windows for which the choice of the rules counts as better by `PRIOR_GAIN`."""
PRIOR_GAIN = 0.05
MOST_WINDOWS = 60.0
"""Older windows fade: no policy counts for more windows than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandit:
    """The selector. Its memory is, by level and policy, the windows and the mean reward."""

    width: float = 0.2
    """How much an untried policy is preferred."""
    margin: float = 0.03
    """By how much the bound of another policy must exceed that of the active one."""
    arms: tuple[str, ...] = ("sjf", "edf", "urgency", "two-lane")
    prior: rules.Rules = field(default_factory=rules.Rules)

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        tried = memory.get("active", "")
        was_taken_back = tried in self.arms and tried not in allow
        if tried == active or was_taken_back:  # else a bypass or a person shared the window
            _reward(memory, qos, tried, self.prior.enough)
        memory["active"] = active
        if not features.is_evidence(qos):
            memory.pop("level", None)
            return None
        level = str(sum(features.wait_s(qos) >= bound for bound in LEVELS_S))
        memory["level"] = level
        arms = [name for name in self.arms if name in allow]
        if active not in arms:
            arms.append(active)
        asked = self.prior.propose(qos, active, allow)
        usual = asked.policy if asked is not None else active
        bounds = self._bounds(memory.get("seen", {}).get(level, {}), arms, usual)
        first, *others = sorted(bounds, key=lambda name: -bounds[name])
        if first == active or bounds[first] < bounds[active] + self.margin:
            return None
        likely = {name: f"{min(bounds[name], 1.0):.0%}" for name in (first, active)}  # a bound may be above 1
        return Proposal(
            policy=first,
            reason=f"bandit: {first} may meet up to {likely[first]} of the demand, {active} {likely[active]}; "
            f"{features.wait_s(qos):.0f} s of calls wait",
            alternatives=tuple(others),
            expected=f"at most {likely[first]} of the demand is met in time",
        )

    def _bounds(self, seen: dict[str, Any], arms: list[str], usual: str) -> dict[str, float]:
        """The upper confidence bound of each arm. An arm that was never tried has the mean of the others."""
        total = sum(windows for windows, _ in seen.values()) + PRIOR
        known = [mean for _, mean in seen.values()]
        middle = sum(known) / len(known) if known else 0.5
        bounds = {}
        for name in arms:
            windows, mean = seen.get(name, (0.0, 0.0))
            start = middle + (PRIOR_GAIN if name == usual else -PRIOR_GAIN)
            estimate = (windows * mean + PRIOR * start) / (windows + PRIOR)
            bounds[name] = estimate + self.width * math.sqrt(math.log(1 + total) / (windows + PRIOR))
        return bounds


def _reward(memory: Memory, qos: Qos, active: str, enough: int) -> None:
    """Credits the active policy with the window."""
    level, demand = memory.get("level"), max(qos.arrived, qos.with_target)
    if level is None or not qos.with_target or demand < enough:
        return
    seen = memory.setdefault("seen", {}).setdefault(level, {})
    windows, mean = seen.get(active, (0.0, 0.0))
    reward = (qos.with_target - qos.missed) / demand
    seen[active] = [min(windows + 1, MOST_WINDOWS), mean + (reward - mean) / min(windows + 1, MOST_WINDOWS)]
