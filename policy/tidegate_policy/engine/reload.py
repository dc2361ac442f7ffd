"""Whether KV that was saved outside the engine is loaded again, or its tokens are computed again.

A session that returns after a tool, or a call that resumes after a preemption, may find a part of its context in host
memory (the "swap" of AugServe eq 6, Semantic eq 3). Loading pays if it takes less time than the prefill that it saves.
The last tokens of a context cost the most to compute, because they attend to all tokens before them, so a part of the
saved tokens is never the best choice: all or none.
"""

from tidegate_policy.cost import CostModel


def pays(cost: CostModel, *, context_tokens: int, cached_tokens: int, saved_tokens: int) -> bool:
    """Whether to load `saved_tokens` that follow the `cached_tokens` at the start of a context of `context_tokens`.

    A cost model without a time for a transfer (`swap_s` = 0) says nothing about it, and then saved tokens are loaded."""
    load_s = cost.swap_s * saved_tokens + cost.prefill_seconds(context_tokens, cached_tokens + saved_tokens)
    return load_s <= cost.prefill_seconds(context_tokens, cached_tokens)
