"""`prefix-score`: the weighted scorers of llm-d's and the Gateway API's endpoint picker.

The score of an engine is `3 * matched share of the prompt + 2 * queue score + 2 * share of the KV cache that is free`, the
weights of their default configuration. The queue score is one for the engine with the fewest calls and zero for the engine
with the most.
"""

from collections import Counter

from tidegate_policy.dispatch.routing import Choice, RoutableEngine, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule
from tidegate_policy.model import Call, EngineId

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


class PrefixScore(DispatchRule):
    """Ties rotate. KV in use is counted from the calls that are at the engine."""

    def __init__(self) -> None:
        self._in_use: Counter[EngineId] = Counter()

    def choose(self, context: RoutingContext) -> Choice:
        loads = [engine.calls for engine in context.engines]
        most, least = max(loads), min(loads)

        def score(engine: RoutableEngine) -> float:
            matched = engine.cached_tokens / context.call.prompt_tokens
            queue = (most - engine.calls) / (most - least) if most > least else 1.0
            free = 1 - min(self._in_use[engine.id] / engine.cost.kv_tokens, 1.0)
            return PREFIX_WEIGHT * matched + QUEUE_WEIGHT * queue + KV_WEIGHT * free

        start = context.turn % len(context.engines)
        rotated = [*context.engines[start:], *context.engines[:start]]
        scores = {engine.id: score(engine) for engine in rotated}
        return Choice(engine=max(rotated, key=lambda engine: scores[engine.id]), scores=scores)

    def on_sent(self, now: float, call: Call, engine: EngineId) -> None:
        self._in_use[engine] += _tokens(call)

    def on_end(self, now: float, call: Call, engine: EngineId) -> None:
        self._in_use[engine] -= _tokens(call)
        if self._in_use[engine] <= 0:
            del self._in_use[engine]


def _tokens(call: Call) -> int:
    return call.prompt_tokens
