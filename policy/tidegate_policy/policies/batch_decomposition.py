"""The predicted duration of a request group, by decomposition into batches (RelServe Algorithm 1, eq 9 and 10).

The calls of a group are filled into prefill batches of at most `max_step_tokens` uncached tokens. When the cache or the
batch is full, the calls in it are decoded to their end, and the filling begins again with an empty cache (the printed
algorithm forgets to reset its count of cached tokens). Calls that decode already need no prefill, and only their remaining
tokens count.
"""

from collections.abc import Iterable, Sequence

from tidegate_policy.cost import CostModel


def seconds(
    cost: CostModel, *, uncached: Iterable[float], output: int, decoding: Sequence[int] = (), context: float = 0.0
) -> float:
    """`PEM(R)`: seconds of a group alone on the engine.

    `uncached`: the uncached prompt tokens of each call that waits, in order. `decoding`: the output tokens that each
    running call still needs. `output`: the output tokens of a call. `context`: mean context of a call in tokens.
    """
    decode_s = cost.decode_s + cost.context_s * context
    max_tokens, max_calls, kv_tokens = cost.max_step_tokens, cost.max_batch, cost.kv_tokens
    total_s = 0.0
    batch = 0.0
    held = 0.0
    calls, left, steps = len(decoding), sum(decoding), max(decoding, default=0)
    for tokens in uncached:
        if calls and (tokens + held > kv_tokens or calls + 1 > max_calls):
            total_s += _prefill_s(cost, batch) + decode_s * left + cost.step_s * steps
            batch = held = 0.0
            calls = left = steps = 0
        if batch and tokens + batch > max_tokens:
            total_s += _prefill_s(cost, batch)
            batch = 0.0
        batch += tokens
        held += tokens
        calls += 1
        left += output
        steps = output if output > steps else steps
    return total_s + _prefill_s(cost, batch) + decode_s * left + cost.step_s * steps


def _prefill_s(cost: CostModel, tokens: float) -> float:
    """A prefill batch. A prompt that is longer than a step takes several steps (chunked prefill)."""
    if not tokens:
        return 0.0
    return cost.prefill_s * tokens + cost.step_s * -(-tokens // cost.max_step_tokens)
