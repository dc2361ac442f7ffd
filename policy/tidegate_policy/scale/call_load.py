"""How many seconds of an engine does a stream of calls take, on an engine of any kind?

A `CallLoad` sums up calls without naming an engine, so that a gateway can count while no engine exists. The cost model of a
kind of engine turns the sums into seconds. Loads add up, and a load divided by seconds is a rate.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLoad:
    """Sums over calls. The fields are the factors of the coefficients of `CostModel`."""

    calls: float = 0.0
    prompt_tokens: float = 0.0
    """Uncached tokens of the prompts."""
    attended_tokens: float = 0.0
    """(Prompt token, token that it attends to) pairs."""
    output_tokens: float = 0.0
    """Predicted tokens of the answers, of all sequences."""
    context_tokens: float = 0.0
    """KV tokens that all decode steps read. It is the KV memory of the calls, in tokens times steps, too."""

    def __add__(self, other: "CallLoad") -> "CallLoad":
        return CallLoad(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            attended_tokens=self.attended_tokens + other.attended_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            context_tokens=self.context_tokens + other.context_tokens,
        )

    def times(self, factor: float) -> "CallLoad":
        """The load, `factor` times."""
        return CallLoad(
            calls=self.calls * factor,
            prompt_tokens=self.prompt_tokens * factor,
            attended_tokens=self.attended_tokens * factor,
            output_tokens=self.output_tokens * factor,
            context_tokens=self.context_tokens * factor,
        )


NOTHING = CallLoad()
LEAST_CALLS = 1e-9
"""A load of fewer calls, or of fewer calls in a second, has no mean call."""


def mean(load: CallLoad) -> CallLoad:
    """The load of the mean call, or nothing if there are no calls."""
    return load.times(1 / load.calls) if load.calls >= LEAST_CALLS else NOTHING


class Tally:
    """A load that is still being counted. It counts every call of a gateway, so it makes no object for each."""

    __slots__ = ("_attended", "_calls", "_context", "_output", "_prompt", "_shown")

    def __init__(self) -> None:
        self._calls = 0
        self._prompt = 0
        self._attended = 0.0
        self._output = 0
        self._context = 0.0
        self._shown = NOTHING

    def add(self, call: Call) -> None:
        """Counts a call with its predicted length."""
        self._count(call, 1)

    def remove(self, call: Call) -> None:
        """Takes out a call that was counted."""
        self._count(call, -1)

    def _count(self, call: Call, times: int) -> None:
        prompt, each = call.prompt_tokens, call.output_predicted
        tokens = times * each * call.sequences
        self._calls += times
        self._prompt += times * prompt
        self._attended += times * prompt * (prompt + 1) / 2
        self._output += tokens
        self._context += tokens * (prompt + each / 2)

    @property
    def load(self) -> CallLoad:
        """What was counted so far. No sum is ever less than the one before, because readers take the difference for the
        load since then: what was taken out makes up for calls that come later."""
        before = self._shown
        self._shown = CallLoad(
            calls=max(self._calls, before.calls),
            prompt_tokens=max(self._prompt, before.prompt_tokens),
            attended_tokens=max(self._attended, before.attended_tokens),
            output_tokens=max(self._output, before.output_tokens),
            context_tokens=max(self._context, before.context_tokens),
        )
        return self._shown


def of_calls(calls: Iterable[Call]) -> CallLoad:
    """The load of calls with their predicted lengths."""
    tally = Tally()
    for call in calls:
        tally.add(call)
    return tally.load


def engine_seconds(load: CallLoad, cost: CostModel, *, tpot_s: float | None = None) -> float:
    """Seconds for which the load keeps one engine of this kind fully occupied; infinite if it cannot meet `tpot_s`.

    The work that batching cannot share adds up. The fixed time of a step is shared by the whole batch, which the KV memory,
    `max_batch` and `max_step_tokens` bound. By Little's law the steps that a load needs are at least its context over the
    memory, its tokens over `max_batch`, and its prompts over `max_step_tokens`.

    With unshared work `w` a second, a step lasts `step_s / (1 - w)` seconds, because the rest of each second is left for
    the fixed times. A target of `tpot_s` seconds for each token thus leaves `1 - step_s / tpot_s` of each second for work.
    """
    unshared_s = unshared_seconds(load, cost)
    steps = max(
        load.context_tokens / cost.kv_tokens,
        load.output_tokens / cost.max_batch,
        load.prompt_tokens / cost.max_step_tokens,
    )
    seconds = unshared_s + cost.step_s * steps
    if tpot_s is None or not load.output_tokens:
        return seconds
    return max(seconds, unshared_s / (1 - cost.step_s / tpot_s)) if tpot_s > cost.step_s else math.inf


def unshared_seconds(load: CallLoad, cost: CostModel) -> float:
    """Seconds of the load that batching cannot share."""
    return (
        cost.prefill_s * load.prompt_tokens
        + cost.attention_s * load.attended_tokens
        + cost.decode_s * load.output_tokens
        + cost.context_s * load.context_tokens
    )


def places(load: CallLoad, cost: CostModel) -> float:
    """Sequences like those of the load that one engine holds at the same time; at least 1."""
    if not load.output_tokens:
        return float(cost.max_batch)
    context = load.context_tokens / load.output_tokens
    return max(min(cost.kv_tokens / max(context, 1.0), float(cost.max_batch)), 1.0)
