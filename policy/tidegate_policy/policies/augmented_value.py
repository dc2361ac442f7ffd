"""The scheduling value of a call that may invoke a tool: the KV memory that it will occupy, over time (AugServe eq 4-25).

The paper measures byte-seconds. Here the footprint of a token is one over the capacity of the cache, so a value is in
seconds of the whole cache. One formula serves both stages. `total` is the context that earlier calls of the session have
built (0 before the first call, stage I), and `cached` is the part of it that the prefix cache still holds: all of it after
*preserve*, none after *discard* (stage II).
"""

from tidegate_policy.cost import CostModel


def value_s(
    cost: CostModel,
    *,
    total: int,
    returned: int,
    output: float,
    cached: int,
    tool_s: float,
    others: int,
    swap_tokens: float,
) -> float:
    """Cache-seconds of a call: `returned` new prompt tokens after `total` known tokens, then `output` tokens, then a tool.

    `others` is the context of the other running calls. `swap_tokens` can be swapped in a step; 0 = no swap."""
    token_s = prefill_token_s(cost)
    if not total and not tool_s:
        return simple_value_s(token_s, cost.step_s, cost.kv_tokens, returned, output)
    prompt = total + returned
    recompute = token_s * (total * total - cached * cached) / 2  # eq 17; eq 9 has no context before it
    process = token_s * (total * returned + returned * returned / 2)  # eq 18, and eq 9 where total is 0
    decode = cost.step_s * (prompt * output + output * output / 2)  # eq 10, eq 19
    held = 0.0
    if tool_s:
        held = _held(cost, context=prompt + output, tool_s=tool_s, others=others, swap_tokens=swap_tokens)
    return (recompute + process + decode + held) / cost.kv_tokens


def simple_value_s(token_s: float, step_s: float, kv_tokens: int, prompt: int, output: float) -> float:
    """`value_s` of a call with no context before it and no tool after it."""
    return (token_s * (prompt * prompt / 2) + step_s * (prompt * output + output * output / 2)) / kv_tokens


def prefill_token_s(cost: CostModel) -> float:
    """Seconds of a prompt token in a full prefill step."""
    return (cost.step_s + cost.prefill_s * cost.max_step_tokens) / cost.max_step_tokens


def _held(cost: CostModel, *, context: float, tool_s: float, others: int, swap_tokens: float) -> float:
    """Token-seconds of the context while the tool runs, under the treatment that wastes least (eq 4-8, 11-15)."""
    recompute_s = cost.prefill_seconds(int(context))
    preserve = tool_s * context  # eq 4
    wastes = [(preserve, preserve), (recompute_s * (context + others), 0.0)]  # eq 5
    if swap_tokens:
        swap_s = cost.step_s * context / swap_tokens
        wastes.append((2 * swap_s * cost.max_step_tokens, swap_s * context / 2))  # eq 6, eq 12
    return min(wastes)[1]
