"""How many tokens does a call have? Learned from the usage that engines report.

The gateway has no tokenizer. A prompt is counted in characters and divided by the characters per token observed for the
tenant and the model (`text_density`). The output length follows the calls of the same kind: the same workflow template or
tenant, the same stage or class, the same model. A client's `max_tokens` only bounds the prediction, because answers rarely
reach it. An unknown kind gets the model's own mean.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tidegate_policy import immutable
from tidegate_policy.cost import CostModel, mean_call_seconds
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict import conformal_bound, text_density

DEFAULT_OUTPUT_TOKENS = 128.0
DEFAULT_PROMPT_TOKENS = 256.0
MESSAGE_TOKENS = 5.0
"""Tokens that a chat template adds for each message."""
MEDIA_CHARACTERS = 2000
"""The characters that an image or a sound counts for, until the engine's usage corrects the estimate."""
NEWEST_WEIGHT = 0.02
"""Weight of the newest observation once a kind is known."""
LEAST_SIZED = 4
"""Calls of one size before their mean is used."""
SIZED_WINS = 0.95
"""The mean by size is used where its error is smaller by this factor."""
RISK = 0.05
"""The share of calls that may exceed the upper bound."""
LEAST_ERRORS = 20
"""Errors of a bucket before it has a bound: with fewer the largest one would be exceeded too often."""
MOST_TOKENS = 1 << 40
"""Beyond any output."""
MAX_KINDS = 4096
"""Kinds remembered; the kind observed least recently is forgotten first."""
MAX_MODELS = 1024
"""Models for which errors of predictions, and whether they read images, are remembered."""

Kind = tuple[str, str, str]
"""(template or tenant, stage or class, model)."""


_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class Lengths:
    """Lengths of the calls of one kind, in tokens."""

    seen: int = 0
    prompt: float = DEFAULT_PROMPT_TOKENS
    output: float = DEFAULT_OUTPUT_TOKENS

    error: float = 0.0
    """Mean absolute error of `output` as a prediction."""
    sized_error: float = 0.0
    """The same of the mean of calls of this kind with prompts of the same size."""

    def add(self, prompt: float, output: float) -> None:
        """One more call."""
        weight = max(NEWEST_WEIGHT, 1 / (self.seen + 1))
        self.seen += 1
        self.prompt += weight * (prompt - self.prompt)
        self.output += weight * (output - self.output)

    def compare(self, error: float, sized_error: float) -> None:
        """The errors that both predictions of the newest call had."""
        self.error += NEWEST_WEIGHT * (error - self.error)
        self.sized_error += NEWEST_WEIGHT * (sized_error - self.sized_error)


@immutable.value(frozen=True, slots=True, kw_only=True)
class LengthPrediction:
    """The predicted output length of each sequence of a call, in tokens."""

    expected: int
    upper: int
    """A bound that about one call of twenty exceeds; 0 = unknown."""


@immutable.value(frozen=True, slots=True, kw_only=True)
class LengthObservation:
    """The usage that an engine reported for a finished call."""

    tenant: str
    characters: int
    """Characters of all prompts; 0 = unknown, as for prompts given in token ids."""
    media: int = 0
    """Images and sounds of all prompts."""
    messages: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    """Of all sequences."""


class OutputLengths:
    """Predicts prompt and output lengths. All methods take constant time."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, Lengths] = OrderedDict()
        self._density = text_density.TextDensity()
        self._sized: OrderedDict[tuple[Kind, int], Lengths] = OrderedDict()
        """By kind and by the power of two below the prompt's tokens."""
        self._bounds: OrderedDict[str, conformal_bound.ConformalBound] = OrderedDict()
        """The errors of predictions, by model."""
        self._read_media: OrderedDict[str, None] = OrderedDict()
        """The models whose engines have answered a prompt with images or sounds."""

    def prompt_tokens(self, tenant: str, model: str, characters: int, messages: int, media: int = 0) -> int:
        """Predicted prompt tokens; at least 1. Images and sounds count once an engine has answered a prompt with some: the
        engines of a model without them reject such a call, and it is no work."""
        if media and model in self._read_media:
            characters += MEDIA_CHARACTERS * media
        per_token = self._density.characters_per_token(tenant, model)
        return max(1, round(characters / per_token + MESSAGE_TOKENS * messages))

    def predict(self, kind: Kind, max_tokens: int | None, prompt_tokens: int = 0) -> LengthPrediction:
        """The output length of each sequence of a call of `kind`. `prompt_tokens`: 0 = unknown."""
        lengths = self._of(kind)
        most = math.inf if max_tokens is None else max(max_tokens, 1)
        own = max(1, round(self._output(kind, lengths, prompt_tokens)))
        predicted = min(own, round(min(most, MOST_TOKENS)))
        bounds = self._bounds.get(kind[2])
        known = bounds is not None and lengths.seen and bounds.seen(own) >= LEAST_ERRORS
        bound = min(bounds.upper(own, own) if bounds is not None and known else math.inf, most)
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
        characters = seen.characters + MEDIA_CHARACTERS * seen.media
        if characters >= 32 and text_tokens >= 8:
            self._density.observe(seen.tenant, model, characters / text_tokens)
        if seen.media:
            self._read_media[model] = None
            if len(self._read_media) > MAX_MODELS:
                self._read_media.popitem(last=False)
        output = round(seen.output_tokens / seen.sequences)
        lengths = self._of(kind)
        sized = self._sized.get((kind, seen.prompt_tokens.bit_length()))
        if lengths.seen:
            predicted = max(1, round(self._output(kind, lengths, seen.prompt_tokens)))
            self._bounds.setdefault(model, conformal_bound.ConformalBound(risk=RISK)).observe(
                predicted, predicted, output
            )
            self._bounds.move_to_end(model)
            if len(self._bounds) > MAX_MODELS:
                self._bounds.popitem(last=False)
        if sized is not None:
            lengths.compare(abs(lengths.output - output), abs(sized.output - output))
        _add(self._sized, (kind, seen.prompt_tokens.bit_length()), seen.prompt_tokens, output)
        for key in dict.fromkeys((kind, ("", "", model))):
            _add(self._kinds, key, seen.prompt_tokens, output)

    def _output(self, kind: Kind, lengths: Lengths, prompt_tokens: int) -> float:
        """The mean of calls with prompts of about this size, where it was the better prediction for the kind so far; else
        the mean of the kind."""
        if lengths.sized_error < SIZED_WINS * lengths.error:
            sized = self._sized.get((kind, prompt_tokens.bit_length()))
            if sized is not None and sized.seen >= LEAST_SIZED:
                return sized.output
        return lengths.output

    def _of(self, kind: Kind) -> Lengths:
        return self._kinds.get(kind) or self._kinds.get(("", "", kind[2])) or Lengths()


def _add(known: OrderedDict[_Key, Lengths], key: _Key, prompt: int, output: int) -> None:
    lengths = known.get(key)
    if lengths is None:
        lengths = known[key] = Lengths()
        if len(known) > MAX_KINDS:
            known.popitem(last=False)
    lengths.add(prompt, output)
    known.move_to_end(key)
