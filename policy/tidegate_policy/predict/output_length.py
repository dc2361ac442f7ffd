"""How many tokens does a call have? Learned from the usage that engines report.

The gateway has no tokenizer. A prompt is counted in characters and divided by the characters per token observed for the
model. The output length follows the calls of the same kind: the same workflow template or tenant, the same stage or class,
the same model. A client's `max_tokens` only bounds the prediction, because answers rarely reach it. An unknown kind gets
the model's own mean.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_policy.cost import CostModel, mean_call_seconds
from tidegate_policy.model import Call, CallId

DEFAULT_OUTPUT_TOKENS = 128.0
DEFAULT_PROMPT_TOKENS = 256.0
CHARACTERS_PER_TOKEN = 4.0
MESSAGE_TOKENS = 5.0
"""Tokens that a chat template adds for each message."""
NEWEST_WEIGHT = 0.05
"""Weight of the newest observation once a kind is known."""
MAX_KINDS = 4096
"""Kinds remembered; the kind observed least recently is forgotten first."""
MAX_MODELS = 1024
"""Models for which characters per token are remembered."""

Kind = tuple[str, str, str]
"""(template or tenant, stage or class, model)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the calls of one kind, in tokens."""

    seen: int = 0
    prompt: float = DEFAULT_PROMPT_TOKENS
    output: float = DEFAULT_OUTPUT_TOKENS
    variance: float = 0.0
    """Variance of the output length."""

    def after(self, prompt: float, output: float) -> "Lengths":
        weight = max(NEWEST_WEIGHT, 1 / (self.seen + 1))
        error = output - self.output
        return Lengths(
            seen=self.seen + 1,
            prompt=self.prompt + weight * (prompt - self.prompt),
            output=self.output + weight * error,
            variance=(1 - weight) * (self.variance + weight * error * error) if self.seen else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPrediction:
    """The predicted output length of each sequence of a call, in tokens."""

    expected: int
    upper: int
    """A bound that few calls of the kind exceed; 0 = unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthObservation:
    """The usage that an engine reported for a finished call."""

    characters: int
    """Characters of all prompts; 0 = unknown, as for prompts given in token ids."""
    messages: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    """Of all sequences."""


class OutputLengths:
    """Predicts prompt and output lengths. All methods take constant time."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, Lengths] = OrderedDict()
        self._characters: OrderedDict[str, float] = OrderedDict()

    def prompt_tokens(self, model: str, characters: int, messages: int) -> int:
        """Predicted prompt tokens; at least 1."""
        per_token = self._characters.get(model, CHARACTERS_PER_TOKEN)
        return max(1, round(characters / per_token + MESSAGE_TOKENS * messages))

    def predict(self, kind: Kind, max_tokens: int | None) -> LengthPrediction:
        """The output length of each sequence of a call of `kind`."""
        lengths = self._of(kind)
        most = math.inf if max_tokens is None else max(max_tokens, 1)
        predicted = max(1, round(min(lengths.output, most)))
        upper = lengths.output + 2 * math.sqrt(lengths.variance) if lengths.seen >= 8 else most
        bound = min(upper, most)
        return LengthPrediction(expected=predicted, upper=0 if math.isinf(bound) else max(predicted, math.ceil(bound)))

    def stage_seconds(self, kind: Kind, models: Sequence[CostModel]) -> float:
        """Seconds that one pass of a stage takes, averaged over `models`, the live engines (HexGen eq 5)."""
        lengths = self._of(kind)
        call = Call(
            id=CallId(""),
            arrived_at_s=0.0,
            prompt_tokens=max(1, round(lengths.prompt)),
            output_predicted=max(1, round(lengths.output)),
        )
        return mean_call_seconds(models, call) if models else 1.0

    def observe(self, kind: Kind, seen: LengthObservation) -> None:
        """Learns from a finished call of `kind`."""
        model = kind[2]
        text_tokens = seen.prompt_tokens - MESSAGE_TOKENS * seen.messages
        if seen.characters >= 32 and text_tokens >= 8:
            ratio = min(max(seen.characters / text_tokens, 0.5), 16.0)
            before = self._characters.get(model, CHARACTERS_PER_TOKEN)
            self._characters[model] = before + NEWEST_WEIGHT * 2 * (ratio - before)
            if len(self._characters) > MAX_MODELS:
                self._characters.popitem(last=False)
        for key in dict.fromkeys((kind, ("", "", model))):
            output = round(seen.output_tokens / seen.sequences)
            self._kinds[key] = self._kinds.get(key, Lengths()).after(seen.prompt_tokens, output)
            self._kinds.move_to_end(key)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def _of(self, kind: Kind) -> Lengths:
        return self._kinds.get(kind) or self._kinds.get(("", "", kind[2])) or Lengths()
