"""`earliest-finish`: the engine on which the call itself ends first (minimum completion time).

`least-delay` without the delay that the call causes to the others. It exists to show what that term is worth.
"""

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule


class EarliestFinish(DispatchRule):
    """Scores are negative seconds until the call ends."""

    def choose(self, context: RoutingContext) -> Choice:
        scores = {engine.id: -finish_s for engine, _, finish_s in context.in_time()}
        return Choice(
            engine=max(context.engines, key=lambda engine: scores.get(engine.id, float("-inf"))), scores=scores
        )
