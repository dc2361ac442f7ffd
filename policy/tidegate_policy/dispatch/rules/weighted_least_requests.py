"""`weighted-least-requests`: the engine with the fewest calls for its speed, `(calls + 1) / speed`.

Any proxy that can weigh its backends does this. It is the baseline that counts on unequal engines.
"""

import functools

from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule

REFERENCE_PROMPT_TOKENS, REFERENCE_OUTPUT_TOKENS = 4096, 128
"""The speed of an engine is its speed for a call of this size, alone on the engine, as in a fixed weight."""


@functools.lru_cache(maxsize=1024)
def reference_s(cost: CostModel) -> float:
    """Seconds of the reference call on an engine: the inverse of its weight."""
    return cost.alone_seconds(REFERENCE_PROMPT_TOKENS, REFERENCE_OUTPUT_TOKENS)


class WeightedLeastRequests(DispatchRule):
    """Ties rotate."""

    def choose(self, context: RoutingContext) -> Choice:
        start = context.turn % len(context.engines)
        rotated = [*context.engines[start:], *context.engines[:start]]
        return Choice(engine=min(rotated, key=lambda engine: (engine.calls + 1) * reference_s(engine.cost)))
