"""`score`: the rule of HexGen-Text2SQL (section 4.1, eq 4)."""

from tidegate_policy.dispatch.routing import Choice, RoutableEngine, RoutingContext, Scores
from tidegate_policy.dispatch.rules.contract import DispatchRule

IDLE_S = 1e-3
"""A shorter backlog counts as idle: below it `beta / t_queue` of eq 4 measures noise."""


class Score(DispatchRule):
    """HexGen eq 4, `(1 - alpha) * beta / t_queue - alpha * t_comp`; the highest score wins.

    Idle engines come before busy ones while alpha < 1 and are ranked by `t_comp`. At alpha = 1 the queue term is zero.
    If some engine is predicted to meet the deadline, the engines that are predicted to miss it are left out.
    """

    reads_weights = True

    def choose(self, context: RoutingContext) -> Choice:
        alpha, beta = context.settings.alpha, context.settings.beta
        scores: Scores = {}
        ranked: list[tuple[bool, float, float, RoutableEngine]] = []
        for engine, price, _ in context.in_time():
            service_s = price.service_s
            queue_s = engine.queue_s
            idle = alpha < 1 and queue_s < IDLE_S
            pull = 0.0 if alpha >= 1 or idle else (1 - alpha) * beta / queue_s
            scores[engine.id] = pull - alpha * service_s
            ranked.append((idle, scores[engine.id], -service_s, engine))
        return Choice(engine=max(ranked, key=lambda row: row[:3])[3], scores=scores)
