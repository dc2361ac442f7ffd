"""`least-delay`: the engine on which the call adds the least latency in all.

The added latency is the call's own time there, plus the delay that the call causes to each call already on the engine
by its prefill and by its share of each decode step. With continuous batching few calls wait in line; each step of a
running call is stretched by the prefill of other calls. HexGen eq 4 counts what other calls do to this call. This rule
also counts what this call does to the others (docs/decisions/0005).
"""

from tidegate_policy.dispatch.routing import Choice, RoutingContext, Scores
from tidegate_policy.dispatch.rules.contract import DispatchRule


class LeastDelay(DispatchRule):
    """Scores are negative seconds of added latency."""

    def choose(self, context: RoutingContext) -> Choice:
        scores: Scores = {}
        best, best_score = None, 0.0
        for engine, price, finish_s in context.in_time():
            score = -(finish_s + engine.calls * price.work_s)
            scores[engine.id] = score
            if best is None or score > best_score:
                best, best_score = engine, score
        if best is None:
            raise AssertionError("a rule was asked without engines")
        return Choice(engine=best, scores=scores)
