"""The values that a dispatch rule reads: the call, the engines that can take it, and the price of the call on each.

The dispatcher removes engines that cannot take the call before it builds a `RoutingContext`. A rule only ranks the
rest. The price of a call is computed once for each distinct cost model, because most pools have few kinds of engines.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_policy import immutable
from tidegate_policy.cost import MICROSECONDS, CostModel
from tidegate_policy.dispatch import prefix_index
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, EngineId

Scores = dict[EngineId, float]

DEFAULT_RULE = "least-delay"
"""The dispatch rule of gateways, pools and benchmarks that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """The dispatch rule, and what rules read. No value is tuned while serving (docs/decisions/0025)."""

    rule: str = DEFAULT_RULE
    alpha: float = 0.2
    """For `score`. 0: only the backlog counts, and among idle engines the speed; 1: only the call's own time counts.
    The default is among the best values of HexGen-Text2SQL (0.1 to 0.4)."""
    beta: float = 300.0
    """For `score`, in seconds squared: with a backlog of `beta` seconds, `beta / t_queue` weighs as much as one second.
    The paper does not publish its value; this one was chosen on seeds that no suite runs."""
    prefix_entries: int = prefix_index.DEFAULT_MAX_ENTRIES
    """Entries of the index of prefixes; 0 = no engine is believed to hold a prefix."""
    deadline_filter: bool = True
    """Engines that are predicted to miss a call's deadline are left out while another engine can meet it."""


class RoutableEngine:
    """One engine as a dispatch rule sees it. The dispatcher keeps one object for each engine and updates it in place."""

    __slots__ = ("backlog", "cached_tokens", "calls", "cost", "id", "shared_s")

    def __init__(self, id: EngineId, cost: CostModel, backlog: Backlog = NO_BACKLOG, *, cached_tokens: int = 0) -> None:
        self.id = id
        self.cost = cost
        self.cached_tokens = cached_tokens
        """Prompt tokens of the call at hand that the engine's prefix cache is believed to hold."""
        self.set_backlog(backlog)

    def set_backlog(self, backlog: Backlog) -> None:
        """Records the work on the engine, the work of other gateways included."""
        self.backlog = backlog
        self.calls = backlog.calls
        """Sequences on the engine."""
        self.shared_s = backlog.work_us / MICROSECONDS
        """Seconds of queued work that batching cannot share."""

    @property
    def queue_s(self) -> float:
        """Predicted seconds until the engine has finished its backlog."""
        return self.cost.backlog_seconds(self.backlog)


class Price:
    """What one call costs on one kind of engine. A decision makes several and sends by one, so this is no dataclass and the
    charge with a cache is made when it is asked for."""

    __slots__ = ("_charge", "_saved_s", "cost", "service_s", "work_s")

    def __init__(self, cost: CostModel, service_s: float, charge: Backlog, work_s: float, saved_s: float = 0.0) -> None:
        """`charge` is that of the whole call; `service_s` and `work_s` are without the `saved_s` that a cache avoids."""
        self.cost = cost
        self.service_s = service_s
        """Seconds of the call alone on the engine (HexGen eq 2)."""
        self.work_s = work_s
        """Seconds of the charge that batching cannot share."""
        self._charge = charge
        self._saved_s = saved_s

    @property
    def charge(self) -> Backlog:
        """What the call adds to the engine's backlog."""
        if self._saved_s:
            whole = self._charge
            work_us = whole.work_us - round(self._saved_s * MICROSECONDS)
            self._charge = Backlog(calls=whole.calls, work_us=work_us, output_tokens=whole.output_tokens)
            self._saved_s = 0.0
        return self._charge


class Prices:
    """The prices of one call, computed once for each cost model and number of cached tokens."""

    __slots__ = ("_call", "_known")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._known: dict[tuple[int, int], Price] = {}
        """By the identity of the cost model; the price holds the model, so an identity is not used twice."""

    def of(self, cost: CostModel, cached_tokens: int = 0) -> Price:
        """The price on an engine with this cost model."""
        key = (id(cost), cached_tokens)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._with_cache(cost, cached_tokens) if cached_tokens else self._whole(cost)
        return found

    def _whole(self, cost: CostModel) -> Price:
        service_s, charge = cost.service_and_charge(self._call)
        return Price(cost, service_s, charge, charge.work_us / MICROSECONDS)

    def _with_cache(self, cost: CostModel, cached_tokens: int) -> Price:
        """The price of the whole call without the prefill that the cache avoids, because engines often differ in what they
        hold and decoding costs the same."""
        whole = self.of(cost)
        saved_s = cost.avoided_seconds(self._call.prompt_tokens, cached_tokens)
        return Price(cost, whole.service_s - saved_s, whole.charge, whole.work_s - saved_s, saved_s)

    def mean_service_s(self, kinds: Sequence[tuple[CostModel, int]]) -> float:
        """`mean_comp` of HexGen eq 5: the call's seconds averaged over the engines; 0 for none. `kinds` has each cost model
        with its number of engines."""
        count = sum(engines for _, engines in kinds)
        return sum(self.of(cost).service_s * engines for cost, engines in kinds) / count if count else 0.0


@dataclass(slots=True, kw_only=True)
class RoutingContext:
    """Everything that a dispatch rule may read; one for each decision."""

    now: float
    call: Call
    engines: Sequence[RoutableEngine]
    """The engines that can take the call; never empty, in a stable order."""
    settings: DispatchSettings
    turn: int
    """The number of calls dispatched before this one, for rules that rotate."""
    rng: random.Random
    prices: Prices
    _finishes: list[tuple[RoutableEngine, Price, float]] = field(default_factory=list)

    def price(self, engine: RoutableEngine) -> Price:
        """The price of the call on the engine."""
        return self.prices.of(engine.cost, engine.cached_tokens)

    def finishes(self) -> Sequence[tuple[RoutableEngine, Price, float]]:
        """Each engine with the price of the call and the seconds until the call would end if it joined the engine's batch
        now: its own time, stretched by the work of the other calls that batching cannot share. Computed once."""
        rows = self._finishes
        if not rows:
            # Pools have few kinds of engines, so one price serves many engines that cache nothing of the call.
            known: dict[int, Price] = {}
            for engine in self.engines:
                price = None if engine.cached_tokens else known.get(id(engine.cost))
                if price is None:
                    price = self.price(engine)
                    if not engine.cached_tokens:
                        known[id(engine.cost)] = price
                rows.append((engine, price, price.service_s + engine.shared_s))
        return rows

    def slack_s(self, engine: RoutableEngine) -> float | None:
        """Seconds between the predicted finish and the due instant; None for a call without a deadline."""
        if self.call.due_at_s is None:
            return None
        return self.call.due_at_s - self.now - (self.price(engine).service_s + engine.shared_s)

    def in_time(self) -> Sequence[tuple[RoutableEngine, Price, float]]:
        """The rows of `finishes` for the engines that are predicted to finish the call by its due instant; all rows if no
        engine is, or if the call has no deadline."""
        rows = self.finishes()
        if self.call.due_at_s is None or not self.settings.deadline_filter:
            return rows
        left_s = self.call.due_at_s - self.now
        return [row for row in rows if left_s - row[2] >= 0] or rows


@immutable.value(frozen=True, slots=True, kw_only=True)
class Choice:
    """The engine that a rule names, and the scores by which it did (empty for rules without scores)."""

    engine: RoutableEngine
    scores: Scores = field(default_factory=dict)
