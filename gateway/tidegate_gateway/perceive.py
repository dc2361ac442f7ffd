"""How long is this call likely to be? Learned from the answers that went by.

Prompts are counted in characters (no tokenizer here) and divided by the characters per token seen for the model. Output
lengths follow the calls of the same kind: same workflow template or tenant, same stage or class, same model. A client's
`max_tokens` only bounds the guess: it is rarely what comes out. Perception never delays a call; unknown kinds get the
model's own average.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_policy.cost import CostModel, mean_call_seconds
from tidegate_policy.model import Call, CallId

DEFAULT_OUTPUT = 128.0
DEFAULT_PROMPT = 256.0
CHARACTERS_PER_TOKEN = 4.0
MESSAGE_TOKENS = 5.0
"""What a chat template adds for each message."""
FORGET = 0.05
"""Weight of the newest observation once a kind is known."""
KINDS = 4096
"""Kinds remembered; the one unseen for longest goes."""

Kind = tuple[str, str, str]
"""(template or tenant, stage or class, model)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What calls of one kind were like."""

    seen: int = 0
    prompt: float = DEFAULT_PROMPT
    output: float = DEFAULT_OUTPUT
    spread: float = 0.0
    """Variance of the output length."""

    def after(self, prompt: int, output: int) -> "Lengths":
        weight = max(FORGET, 1 / (self.seen + 1))
        error = output - self.output
        return Lengths(
            seen=self.seen + 1,
            prompt=self.prompt + weight * (prompt - self.prompt),
            output=self.output + weight * error,
            spread=(1 - weight) * (self.spread + weight * error * error) if self.seen else 0.0,
        )


class Perception:
    """Estimates, and what they are learned from. All methods are O(1)."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, Lengths] = OrderedDict()
        self._characters: dict[str, float] = {}

    def prompt_tokens(self, model: str, characters: int, messages: int) -> int:
        per_token = self._characters.get(model, CHARACTERS_PER_TOKEN)
        return max(1, round(characters / per_token + MESSAGE_TOKENS * messages))

    def output_tokens(self, kind: Kind, max_tokens: int | None) -> tuple[int, int]:
        """Predicted tokens of each choice, and a bound that few of its kind exceed (0 = unknown)."""
        lengths = self._of(kind)
        most = math.inf if max_tokens is None else max(max_tokens, 1)
        predicted = max(1, round(min(lengths.output, most)))
        upper = lengths.output + 2 * math.sqrt(lengths.spread) if lengths.seen >= 8 else most
        bound = min(upper, most)
        return predicted, 0 if math.isinf(bound) else max(predicted, math.ceil(bound))

    def stage_seconds(self, kind: Kind, models: Sequence[CostModel]) -> float:
        """Seconds that one pass of a stage takes, averaged over the live engines (HexGen eq 5)."""
        lengths = self._of(kind)
        call = Call(
            id=CallId(""),
            arrival_s=0.0,
            prompt_tokens=max(1, round(lengths.prompt)),
            output_predicted=max(1, round(lengths.output)),
        )
        return mean_call_seconds(list(models), call) if models else 1.0

    def on_usage(
        self, kind: Kind, *, characters: int, messages: int, choices: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        """The engine counted a finished call's tokens."""
        model = kind[2]
        text_tokens = prompt_tokens - MESSAGE_TOKENS * messages
        if characters >= 32 and text_tokens >= 8:
            ratio = min(max(characters / text_tokens, 0.5), 16.0)
            before = self._characters.get(model, CHARACTERS_PER_TOKEN)
            self._characters[model] = before + FORGET * 2 * (ratio - before)
        for key in (kind, ("", "", model)):
            self._kinds[key] = self._kinds.get(key, Lengths()).after(prompt_tokens, round(output_tokens / choices))
            self._kinds.move_to_end(key)
        while len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)

    def _of(self, kind: Kind) -> Lengths:
        return self._kinds.get(kind) or self._kinds.get(("", "", kind[2])) or Lengths()
