"""What all virtual engines have in common, whether vLLM's scheduler or its fast model runs in them."""

from typing import Literal, NamedTuple, Protocol

from tidegate_policy.cost import CostModel
from tidegate_policy.model import Call, CallId

BLOCK_TOKENS = 16
"""Tokens of one KV-cache block."""
MAX_MODEL_LEN = 65536
"""Tokens of a prompt and its output together."""
MAX_OUTPUT_TOKENS = 8192
"""The `max_tokens` of every request. One number for all requests hides the true lengths from the scheduler."""

Prefix = tuple[int, int]
"""The id and the tokens of a part of a prompt that other prompts may share."""


def kv_blocks(kv_tokens: int) -> int:
    """The blocks of a KV cache of `kv_tokens` tokens. vLLM keeps one of them as its null block."""
    return max(kv_tokens // BLOCK_TOKENS, 2)


StockKey = Literal["latest-start", "urgency", "work", "group-work"]
"""What a client of stock vLLM may write into a request's `priority`."""


def stock_priority(key: StockKey, call: Call, cost: CostModel) -> int:
    """The `priority` of a request; the smallest goes first.

    `work` is shortest job first, and `group-work` is RelServe's static priority: the seconds of the whole request group."""
    service_s = cost.call_seconds(call)
    if key == "urgency":
        return call.urgency
    if key == "work":
        return round(service_s * 1000)
    if key == "group-work":
        return round(service_s * 1000) * max(call.group_size, 1)
    return round((call.due_or_patience_at_s - service_s) * 1000)


class EngineLoad(NamedTuple):
    """What an engine's metrics say of its load."""

    running: int
    waiting: int
    kv_usage: float
    """The share of the KV memory that is in use."""


class Listener(Protocol):
    """The receiver of an engine's output."""

    def on_tokens(self, call_id: CallId, produced: int) -> None:
        """The call has produced `produced` tokens so far."""

    def on_end(self, call_id: CallId) -> None:
        """The call has produced its last token."""
