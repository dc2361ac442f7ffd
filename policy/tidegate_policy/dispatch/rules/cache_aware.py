"""`cache-aware`: the rule of the routers of SGLang and vLLM: the longest matched prefix, unless the loads are unequal.

If the busiest engine has `ABSOLUTE_IMBALANCE` calls more and `RELATIVE_IMBALANCE` times the calls of the idlest engine,
the engine with the fewest calls gets the call. Otherwise the engine with the longest matched prefix gets it, if the match
is more than `LEAST_MATCH` of the prompt, and else the engine whose cache holds the least.
"""

from collections import Counter
from collections.abc import Callable

from tidegate_policy.dispatch.routing import Choice, RoutableEngine, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule
from tidegate_policy.model import EngineId

LEAST_MATCH = 0.3
ABSOLUTE_IMBALANCE, RELATIVE_IMBALANCE = 64, 1.5
"""The defaults of SGLang's router."""


class CacheAware(DispatchRule):
    """Counts the tokens that were computed on each engine."""

    def __init__(self) -> None:
        self._tokens: Counter[EngineId] = Counter()

    def choose(self, context: RoutingContext) -> Choice:
        engines = context.engines
        loads = [engine.calls for engine in engines]
        most, least = max(loads), min(loads)
        if most - least > ABSOLUTE_IMBALANCE and most > RELATIVE_IMBALANCE * least:
            return self._chosen(context, lambda engine: engine.calls)
        matched = max(engine.cached_tokens for engine in engines)
        if matched > LEAST_MATCH * context.call.prompt_tokens:
            return self._chosen(context, lambda engine: (-engine.cached_tokens, engine.calls))
        return self._chosen(context, lambda engine: self._tokens[engine.id])

    def on_engine_gone(self, now: float, engine: EngineId) -> None:
        del self._tokens[engine]

    def _chosen(self, context: RoutingContext, key: Callable[[RoutableEngine], object]) -> Choice:
        engine = min(context.engines, key=key)  # type: ignore[arg-type]
        self._tokens[engine.id] += context.call.prompt_tokens - engine.cached_tokens
        return Choice(engine=engine)
