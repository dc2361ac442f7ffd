"""The values that a dispatch rule reads: the call, the engines that can take it, and the price of the call on each.

The dispatcher removes engines that cannot take the call before it builds a `RoutingContext`. A rule only ranks the
rest. The price of a call is computed once for each distinct cost model, because most pools have few kinds of engines.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_policy.cost import MICROSECONDS, CostModel
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, EngineId

Scores = dict[EngineId, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """The dispatch rule and its two parameters. `alpha` may be tuned while serving; `beta` is fixed."""

    rule: str = "least-delay"
    alpha: float = 0.2
    """For `score`. 0: only the backlog counts, and among idle engines the speed; 1: only the call's own time counts."""
    beta: float = 300.0
    """For `score`, in seconds squared: with a backlog of `beta` seconds, `beta / t_queue` weighs as much as one second."""


class RoutableEngine:
    """One engine as a dispatch rule sees it. The dispatcher keeps one object for each engine and updates it in place."""

    __slots__ = ("backlog", "cached_tokens", "cost", "id", "shared_s")

    def __init__(self, id: EngineId, cost: CostModel, backlog: Backlog = NO_BACKLOG, *, cached_tokens: int = 0) -> None:
        self.id = id
        self.cost = cost
        self.cached_tokens = cached_tokens
        """Prompt tokens of the call at hand that the engine's prefix cache is believed to hold."""
        self.set_backlog(backlog)

    def set_backlog(self, backlog: Backlog) -> None:
        """Records the work on the engine, the work of other gateways included."""
        self.backlog = backlog
        self.shared_s = backlog.work_us / MICROSECONDS
        """Seconds of queued work that batching cannot share."""

    @property
    def queue_s(self) -> float:
        """Predicted seconds until the engine has finished its backlog."""
        return self.cost.backlog_seconds(self.backlog)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one call costs on one kind of engine."""

    service_s: float
    """Seconds of the call alone on the engine (HexGen eq 2)."""
    charge: Backlog
    """What the call adds to the engine's backlog."""
    work_s: float
    """Seconds of the charge that batching cannot share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingContext:
    """Everything that a dispatch rule may read."""

    now: float
    call: Call
    engines: Sequence[RoutableEngine]
    """The engines that can take the call; never empty, in a stable order."""
    settings: DispatchSettings
    turn: int
    """The number of calls dispatched before this one, for rules that rotate."""
    rng: random.Random
    _prices: dict[tuple[int, int], Price] = field(default_factory=dict)

    def price(self, engine: RoutableEngine) -> Price:
        """The price of the call on the engine, computed once for each cost model and number of cached tokens."""
        key = (id(engine.cost), engine.cached_tokens)
        found = self._prices.get(key)
        if found is None:
            charge = engine.cost.charge(self.call, engine.cached_tokens)
            found = self._prices[key] = Price(
                service_s=engine.cost.call_seconds(self.call, engine.cached_tokens),
                charge=charge,
                work_s=charge.work_us / MICROSECONDS,
            )
        return found

    def finish_s(self, engine: RoutableEngine) -> float:
        """Seconds until the call would end if it joined the engine's batch now: its own time, stretched by the work of the
        other calls that batching cannot share."""
        return self.price(engine).service_s + engine.shared_s

    def slack_s(self, engine: RoutableEngine) -> float | None:
        """Seconds between the predicted finish and the due instant; None for a call without a deadline."""
        return None if self.call.due_s is None else self.call.due_s - self.now - self.finish_s(engine)

    def in_time(self) -> Sequence[RoutableEngine]:
        """The engines that are predicted to finish the call by its due instant; all engines if none is, or if the call has
        no deadline."""
        if self.call.due_s is None:
            return self.engines
        left_s = self.call.due_s - self.now
        return [engine for engine in self.engines if left_s - self.finish_s(engine) >= 0] or self.engines


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The engine that a rule names, and the scores by which it did (empty for rules without scores)."""

    engine: RoutableEngine
    scores: Scores = field(default_factory=dict)
