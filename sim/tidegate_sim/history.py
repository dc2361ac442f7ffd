"""What earlier workflows of the same kind were like: how long answers get, and how much work follows a stage.

Learned from *other* traces than the one that is run; a scheduler never sees a true length. The stand-in for the length
predictor and the workflow templates of a gateway that has been up for a while.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tidegate_policy import cost
from tidegate_policy.model import Call, CallId
from tidegate_sim.traces import TraceCall

UNKNOWN_OUTPUT_TOKENS = 128
"""For a stage that no earlier workflow had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Means over earlier workflows, by stage."""

    output_tokens: Mapping[str, int]
    tail_s: Mapping[str, float]
    """Seconds of work on the longest path behind a call of the stage, averaged over the pool's engines."""

    def output_of(self, stage: str | None) -> int:
        return self.output_tokens.get(stage or "", UNKNOWN_OUTPUT_TOKENS)

    def tail_of(self, stage: str | None) -> float:
        return self.tail_s.get(stage or "", 0.0)


def learn(calls: Sequence[TraceCall], models: Sequence[cost.CostModel]) -> History:
    """The history that `calls`, finished workflows, make on a pool of engines."""
    outputs: dict[str, list[int]] = defaultdict(list)
    tails: dict[str, list[float]] = defaultdict(list)
    behind = _tails(calls, models)
    for call in calls:
        outputs[call.stage or ""].append(call.output_tokens)
        tails[call.stage or ""].append(behind[call.id])
    return History(
        output_tokens={stage: max(round(fmean(values)), 1) for stage, values in outputs.items()},
        tail_s={stage: fmean(values) for stage, values in tails.items()},
    )


def _tails(calls: Iterable[TraceCall], models: Sequence[cost.CostModel]) -> dict[str, float]:
    """The longest path behind each call. Followers stand after what they follow, so one pass from the end suffices."""
    behind: dict[str, float] = {}
    for call in reversed(list(calls)):
        own_s = cost.mean_call_seconds(list(models), _alone(call)) + behind.setdefault(call.id, 0.0)
        for before in call.after:
            behind[before] = max(behind.get(before, 0.0), own_s)
    return behind


def _alone(call: TraceCall) -> Call:
    return Call(
        id=CallId(call.id), arrival_s=0.0, prompt_tokens=call.prompt_tokens, output_predicted=call.output_tokens
    )
