"""How many tokens does a call have? Learned from the usage that engines report.

The gateway has no tokenizer. A prompt is counted in characters and divided by the characters per token observed for the
tenant and the model (`text_density`). The output length follows the calls of the same kind: the same tenant, the same
workflow template or relQuery, the same stage or class, the same model. A client's `max_tokens` only bounds the
prediction, because answers rarely reach it.

What a tenant's calls are like says nothing about those of another one. An unknown kind gets the mean of the tenant's calls
of the same stage or class without a template or a relQuery, else the tenant's own mean for the model. A tenant that is new
to the model gets the middle of the tenants' means, in which each tenant counts once, and the usual length as one more of
them.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_policy import immutable
from tidegate_policy.cost import CostModel, mean_call_seconds
from tidegate_policy.model import Call, CallId
from tidegate_policy.predict import tenant_bounds, text_density
from tidegate_policy.predict.tenant_median import TenantMedian
from tidegate_policy.tenant_memory import TenantMemory

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
MOST_TOKENS = 1 << 40
"""Beyond any output."""
MAX_KINDS = 4096
"""Kinds of all tenants that are remembered, kinds with a size of prompts, and pairs of a tenant and a model."""
MAX_MODELS = 1024
"""Models of which it is remembered that they read images."""

Kind = tuple[str, str, str, str]
"""(tenant, template, relQuery or "", stage or class, model). An operator's template is the same for all of its tenants, but
what they send is not, so each tenant has kinds of its own."""


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


class _Model:
    """The means of the tenants of one model, with the usual lengths as those of one more."""

    __slots__ = ("outputs", "prompts")

    def __init__(self) -> None:
        self.prompts = TenantMedian(DEFAULT_PROMPT_TOKENS)
        self.outputs = TenantMedian(DEFAULT_OUTPUT_TOKENS)


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
        self._kinds: TenantMemory[Kind, Lengths] = TenantMemory(MAX_KINDS)
        self._sized: TenantMemory[tuple[Kind, int], Lengths] = TenantMemory(MAX_KINDS)
        """By kind and by the power of two below the prompt's tokens."""
        self._tenants: TenantMemory[str, Lengths] = TenantMemory(MAX_KINDS)
        """The calls of each tenant by model."""
        self._models: dict[str, _Model] = {}
        """The models of which a tenant is remembered."""
        self._density = text_density.TextDensity()
        self._bounds = tenant_bounds.TenantBounds()
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
        margin = self._bounds.margin(kind[0], kind[3], own)
        bound = most if margin is None else min(own + margin, most)
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
        tenant, model = kind[0], kind[3]
        text_tokens = seen.prompt_tokens - MESSAGE_TOKENS * seen.messages
        characters = seen.characters + MEDIA_CHARACTERS * seen.media
        if characters >= 32 and text_tokens >= 8:
            self._density.observe(seen.tenant, model, characters / text_tokens)
        if seen.media:
            self._read_media[model] = None
            self._read_media.move_to_end(model)
            if len(self._read_media) > MAX_MODELS:
                self._read_media.popitem(last=False)
        output = round(seen.output_tokens / seen.sequences)
        lengths = self._of(kind)
        if lengths.seen:
            predicted = max(1, round(self._output(kind, lengths, seen.prompt_tokens)))
            self._bounds.observe(tenant, model, predicted, output)
        size = (kind, seen.prompt_tokens.bit_length())
        own, sized = self._kinds.get(tenant, kind) or Lengths(), self._sized.get(tenant, size) or Lengths()
        if own.seen and sized.seen:
            own.compare(abs(own.output - output), abs(sized.output - output))
        own.add(seen.prompt_tokens, output)
        sized.add(seen.prompt_tokens, output)
        self._kinds.put(tenant, kind, own)
        self._sized.put(tenant, size, sized)
        self._observe_tenant(tenant, model, seen.prompt_tokens, output)

    def _observe_tenant(self, tenant: str, model: str, prompt: int, output: int) -> None:
        own = self._tenants.get(tenant, model)
        every = self._models.get(model)
        if every is None:
            every = self._models[model] = _Model()
        prompt_before, output_before = (None, None) if own is None else (own.prompt, own.output)
        if own is None:
            own = Lengths()
        own.add(prompt, output)
        every.prompts.change(prompt_before, own.prompt)
        every.outputs.change(output_before, own.output)
        gone = self._tenants.put(tenant, model, own)
        if gone is not None:
            _, model, own = gone
            every = self._models[model]
            every.prompts.change(own.prompt, None)
            every.outputs.change(own.output, None)
            if len(every.outputs) == 1:
                del self._models[model]

    def _output(self, kind: Kind, lengths: Lengths, prompt_tokens: int) -> float:
        """The mean of calls with prompts of about this size, where it was the better prediction for the kind so far; else
        the mean of the kind."""
        if lengths.sized_error < SIZED_WINS * lengths.error:
            sized = self._sized.get(kind[0], (kind, prompt_tokens.bit_length()))
            if sized is not None and sized.seen >= LEAST_SIZED:
                return sized.output
        return lengths.output

    def _of(self, kind: Kind) -> Lengths:
        """The calls of the kind, else those of its class without template or relQuery, else those of the tenant, else
        what is expected of a new tenant."""
        tenant, _, name, model = kind
        known = (
            self._kinds.get(tenant, kind)
            or self._kinds.get(tenant, (tenant, "", name, model))
            or self._tenants.get(tenant, model)
        )
        if known is not None:
            return known
        every = self._models.get(model)
        if every is None:
            return Lengths()
        return Lengths(seen=len(every.outputs) - 1, prompt=every.prompts.middle, output=every.outputs.middle)
