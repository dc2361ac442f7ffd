"""Which engine? Filter, score, pick (HexGen section 4.1).

A rule sees one call and every engine as of now, and names one. Engines that cannot take the call (down, draining, full)
are filtered before; rules only rank. `least-delay` is the default, `score` is the paper's; the others are baselines that
stay for comparison. The functions are pure: round robin is handed its turn, power of two its random source.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate_policy.cost import MICROSECONDS, CostModel
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, Decision, EngineId

IDLE_S = 1e-3
"""Backlogs shorter than this count as idle: below it eq 4's `beta / t_queue` measures noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine as a dispatcher sees it at one instant."""

    id: EngineId
    cost: CostModel
    backlog: Backlog = NO_BACKLOG
    """Everybody's work on the engine, other gateways' included."""
    cached_tokens: int = 0
    """Prompt tokens of this call that the engine's prefix cache is believed to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How engines are ranked; `alpha` may be tuned while serving, `beta` is fixed."""

    rule: str = "least-delay"
    alpha: float = 0.2
    """For `score`. 0: only the backlog counts, and among idle engines the speed; 1: only the call's own time counts."""
    beta: float = 300.0
    """For `score`, in seconds squared: with a backlog of `beta` seconds, `beta / t_queue` weighs as much as one second."""


class UnknownRule(ValueError):
    """A dispatch rule that does not exist; the message lists those that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingContext:
    """Everything that a rule may look at."""

    now: float
    call: Call
    engines: Sequence[EngineView]
    """Those that can take the call; never empty, in a stable order."""
    dispatch: Dispatch
    turn: int
    """Counts dispatches, for rules that rotate."""
    rng: random.Random

    def finish_s(self, engine: EngineView) -> float:
        """Seconds until the call would be done if it joined the engine's batch now: its own time, stretched by the work
        that cannot be shared with the calls already there."""
        shared_s = engine.backlog.work_us / MICROSECONDS
        return engine.cost.call_seconds(self.call, engine.cached_tokens) + shared_s

    def slack_s(self, engine: EngineView) -> float | None:
        """Seconds between the predicted finish and the due instant; None without a deadline."""
        return None if self.call.due_s is None else self.call.due_s - self.now - self.finish_s(engine)


def choose(question: RoutingContext) -> Decision:
    """Names the engine for the call. Raises `UnknownRule`."""
    try:
        rule = RULES[question.dispatch.rule]
    except KeyError:
        known = ", ".join(sorted(RULES))
        raise UnknownRule(f"unknown dispatch rule {question.dispatch.rule!r}; known are {known}") from None
    engine, scores = rule(question)
    return Decision(
        engine=engine.id,
        rule=question.dispatch.rule,
        queue_s=engine.cost.backlog_seconds(engine.backlog),
        service_s=engine.cost.call_seconds(question.call, engine.cached_tokens),
        slack_s=question.slack_s(engine),
        scores=scores,
    )


Scores = dict[EngineId, float]


def _score(question: RoutingContext) -> tuple[EngineView, Scores]:
    """HexGen eq 4, `(1 - alpha) * beta / t_queue - alpha * t_comp`, highest wins.

    Idle engines come before busy ones while alpha < 1 and are ranked by `t_comp`; at alpha = 1 the queue term is gone.
    If some engine is predicted to meet the deadline, those that are not are left out.
    """
    alpha, beta = question.dispatch.alpha, question.dispatch.beta
    scores: Scores = {}
    ranked: list[tuple[bool, float, float, EngineView]] = []
    for engine in _in_time(question):
        service_s = engine.cost.call_seconds(question.call, engine.cached_tokens)
        queue_s = engine.cost.backlog_seconds(engine.backlog)
        idle = alpha < 1 and queue_s < IDLE_S
        pull = 0.0 if alpha >= 1 or idle else (1 - alpha) * beta / queue_s
        scores[engine.id] = pull - alpha * service_s
        ranked.append((idle, scores[engine.id], -service_s, engine))
    return max(ranked, key=lambda row: row[:3])[3], scores


def _in_time(question: RoutingContext) -> Sequence[EngineView]:
    slacks = [(engine, question.slack_s(engine)) for engine in question.engines]
    return [engine for engine, slack_s in slacks if slack_s is not None and slack_s >= 0] or question.engines


def _least_delay(question: RoutingContext) -> tuple[EngineView, Scores]:
    """The engine on which the call adds the least latency in all: its own time there, plus the delay that its prefill and
    its share of each decode step do to every call already on the engine.

    With continuous batching few calls wait in line; what hurts is that each step of a running call is stretched by other
    calls' prefill. Eq 4 counts what others do to the call; this counts what the call does to the others as well. Scores
    are negative seconds.
    """
    scores: Scores = {}
    for engine in _in_time(question):
        work_s = engine.cost.charge(question.call, engine.cached_tokens).work_us / MICROSECONDS
        scores[engine.id] = -(question.finish_s(engine) + engine.backlog.calls * work_s)
    engines = {engine.id: engine for engine in question.engines}
    return engines[max(scores, key=lambda name: scores[name])], scores


def _round_robin(question: RoutingContext) -> tuple[EngineView, Scores]:
    """Each engine in turn, whatever it is."""
    return question.engines[question.turn % len(question.engines)], {}


def _least_requests(question: RoutingContext) -> tuple[EngineView, Scores]:
    """The engine with the fewest calls; ties rotate. What gateways do today."""
    start = question.turn % len(question.engines)
    rotated = [*question.engines[start:], *question.engines[:start]]
    return min(rotated, key=lambda engine: engine.backlog.calls), {}


def _power_of_two(question: RoutingContext) -> tuple[EngineView, Scores]:
    """Two at random, the one with fewer calls (Mitzenmacher)."""
    pair = question.rng.sample(question.engines, min(2, len(question.engines)))
    return min(pair, key=lambda engine: engine.backlog.calls), {}


RULES: dict[str, Callable[[RoutingContext], tuple[EngineView, Scores]]] = {
    "score": _score,
    "least-delay": _least_delay,
    "round-robin": _round_robin,
    "least-requests": _least_requests,
    "power-of-two": _power_of_two,
}
