"""`power-of-two`: of two engines drawn at random, the one with fewer calls (Mitzenmacher)."""

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule


class PowerOfTwo(DispatchRule):
    """The draw comes from the dispatcher's random source."""

    def choose(self, context: RoutingContext) -> Choice:
        pair = context.rng.sample(context.engines, min(2, len(context.engines)))
        return Choice(engine=min(pair, key=lambda engine: engine.calls))
