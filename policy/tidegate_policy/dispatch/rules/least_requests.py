"""`least-requests`: the engine with the fewest calls. Most gateways do this today."""

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule


class LeastRequests(DispatchRule):
    """Ties rotate."""

    def choose(self, context: RoutingContext) -> Choice:
        start = context.turn % len(context.engines)
        rotated = [*context.engines[start:], *context.engines[:start]]
        return Choice(engine=min(rotated, key=lambda engine: engine.calls))
