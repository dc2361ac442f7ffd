"""`round-robin`: each engine in turn, whatever its speed and load."""

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.dispatch.rules.contract import DispatchRule


class RoundRobin(DispatchRule):
    """The turn modulo the number of engines."""

    def choose(self, context: RoutingContext) -> Choice:
        return Choice(engine=context.engines[context.turn % len(context.engines)])
