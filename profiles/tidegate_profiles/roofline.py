"""The roofline of an engine: its coefficients by the datasheet of its cards and the size of its model.

It is what the cards can do at the shares of their peaks below, and no measurement. `estimate_error` compares it with the
profiles whose coefficients come from timings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARITHMETIC_SHARE = 0.5
"""Share of the peak of the arithmetic that prefills reach."""
BANDWIDTH_SHARE = 0.6
"""Share of the peak of the memory's bandwidth at which decoding reads weights and KV."""
MEMORY_SHARE = 0.9
"""Share of the memory that vLLM uses by default."""
RESERVE_BYTES = 2e9
"""Memory of a card for activations and programs."""
DERIVATION = (
    "prefill_s: two operations a parameter at half the peak. The time of a decode step: the weights at 60% of the peak "
    "bandwidth. decode_s = prefill_s / 2 and step_s = step - decode_s: the straight line that meets the roofline "
    "max(step, batch * prefill_s) at an empty batch and at twice its ridge. attention_s: 4 * hidden * layers operations a "
    "pair at half the peak. context_s: KV bytes at 60% of the peak bandwidth. kv_tokens: 90% of the memory minus weights "
    "minus 2 GB a card. max_batch and max_step_tokens: vLLM's defaults for these cards."
)
COEFFICIENTS = ("step_s", "prefill_s", "attention_s", "decode_s", "context_s")


class TooLarge(ValueError):
    """The weights leave no memory for KV; the message says how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Model and cards, as the `facts` of a profile have them."""

    parameters: float
    layers: int
    hidden: int
    kv_bytes_a_token: float
    cards: int
    flops_a_card: float
    """Of dense bfloat16 arithmetic."""
    bytes_a_second_a_card: float
    memory_gib_a_card: float
    weight_bytes: float = 2.0
    """Of one parameter."""

    @staticmethod
    def of(profile: Mapping[str, Any]) -> "Facts":
        """The facts of a shipped profile."""
        return Facts(**profile["facts"])


def estimate(facts: Facts) -> dict[str, float]:
    """The five coefficients, in seconds."""
    flops = facts.cards * facts.flops_a_card * ARITHMETIC_SHARE
    bandwidth = facts.cards * facts.bytes_a_second_a_card * BANDWIDTH_SHARE
    prefill_s = 2 * facts.parameters / flops
    decode_s = prefill_s / 2
    return {
        "step_s": facts.parameters * facts.weight_bytes / bandwidth - decode_s,
        "prefill_s": prefill_s,
        "attention_s": 4 * facts.hidden * facts.layers / flops,
        "decode_s": decode_s,
        "context_s": facts.kv_bytes_a_token / bandwidth,
    }


def kv_tokens(facts: Facts) -> int:
    """The tokens whose KV the memory holds beside the weights, in hundreds. Raises `TooLarge`."""
    memory = facts.cards * (facts.memory_gib_a_card * 2**30 * MEMORY_SHARE - RESERVE_BYTES)
    free = memory - facts.parameters * facts.weight_bytes
    tokens = int(free / facts.kv_bytes_a_token) // 100 * 100
    if tokens < 100:
        weights = f"{facts.parameters * facts.weight_bytes / 1e9:.1f} GB of weights"
        room = f"the {memory / 1e9:.1f} GB that vLLM uses of {facts.cards} x {facts.memory_gib_a_card:g} GiB"
        raise TooLarge(f"{weights} leave no room for KV in {room}")
    return tokens
