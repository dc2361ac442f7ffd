"""The selector `classifier`: softmax regression from a window to the policy that serves the next window best (H-MAS C.2).

`tools/steering/train_selectors.py` trains the weights in virtual time, on the development seeds of the suite `maas`, and
writes them to `classifier.json`. A window in which no call waits is never judged.
"""

import functools
import importlib.resources
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_policy.qos import Qos
from tidegate_policy.steer import features
from tidegate_policy.steer.proposal import Memory, Proposal


@functools.cache
def shipped() -> Mapping[str, Sequence[float]]:
    """The weights by policy: one for each feature, and a last one that is constant."""
    text = importlib.resources.files("tidegate_policy.steer").joinpath("classifier.json").read_text("utf-8")
    found = json.loads(text)
    if found["features"] != list(features.NAMES):
        raise ValueError("the weights in classifier.json were trained on other features")
    weights: Mapping[str, Sequence[float]] = found["weights"]
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """The selector."""

    weights: Mapping[str, Sequence[float]] = field(default_factory=shipped)
    margin: float = 0.1
    """By how much the probability of another policy must exceed that of the active one."""

    def propose(self, qos: Qos, active: str, allow: Collection[str], memory: Memory) -> Proposal | None:
        known = [name for name in self.weights if name in allow]
        if not known or not features.is_evidence(qos):
            return None
        found = probabilities({name: self.weights[name] for name in known}, features.vector(qos))
        first, *others = sorted(found, key=lambda name: -found[name])
        if first == active or found[first] < found.get(active, 0.0) + self.margin:
            return None
        evidence = f"{features.wait_s(qos):.0f} s of calls wait, {qos.miss_ratio:.0%} of targets missed"
        return Proposal(
            policy=first,
            reason=f"classifier: {first} is the best with a probability of {found[first]:.0%}: {evidence}",
            alternatives=tuple(others),
            expected=f"the probability of {active} is {found.get(active, 0.0):.0%}",
        )


def probabilities(weights: Mapping[str, Sequence[float]], vector: Sequence[float]) -> dict[str, float]:
    """The probability of each policy."""
    scores = {
        name: sum(weight * value for weight, value in zip(row, (*vector, 1.0), strict=True))
        for name, row in weights.items()
    }
    most = max(scores.values())
    raised = {name: math.exp(score - most) for name, score in scores.items()}
    total = sum(raised.values())
    return {name: value / total for name, value in raised.items()}
