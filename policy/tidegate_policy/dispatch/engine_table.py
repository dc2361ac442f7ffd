"""Which engines accept calls, how fast are they, and how much work do they hold?

Health checks report `EngineFacts`. The table adds what the gateway core knows by itself: failed calls
(`admit.outliers`), what a step of each engine costs (`predict.engine_cost`), and this gateway's own share of the backlog.
"""

import collections
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from tidegate_policy.admit import distrust, outliers
from tidegate_policy.admit.prompt_window import PromptSeconds
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch.call_records import Waiting
from tidegate_policy.dispatch.routing import Price, Prices, RoutableEngine
from tidegate_policy.model import NO_BACKLOG, Backlog, Call, CallId, EngineId
from tidegate_policy.predict import engine_cost

FEW = 2
"""Sequences of a call that may take the last places of an engine."""
ALIKE = 0.02
"""Two learned cost models that price work within this share of each other are taken for one."""

MaxInflight = int | Literal["auto"] | None
"""Sequences that may be out at one engine. "auto" = enough to keep its batch full; None = no bound (early binding)."""


class Health(StrEnum):
    """What health checks say of an engine."""

    UP = "up"
    DOUBTFUL = "doubtful"
    """The last health check failed. The engine gets calls only while every other engine is doubtful too."""
    DOWN = "down"
    """The engine fails its health checks, drains, or serves another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine as discovery, health checks and the shared store describe it."""

    id: EngineId
    cost: CostModel | None
    """The engine's profile, from which the estimate of its costs starts; None = it has none."""
    health: Health = Health.UP
    others: Backlog = NO_BACKLOG
    """Calls that other gateways have sent to the engine and that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What follows when an engine has done its part in a call, or has failed it."""

    ejected_s: float | None = None
    """No call goes to the engine for so many seconds; None = it is not ejected now."""
    avoided_s: float | None = None
    """The calls of the tenant avoid it for so many seconds; None = they do not begin to do so now."""


NOTHING_FOLLOWS = Result()


def max_inflight(setting: MaxInflight, model: CostModel) -> int | None:
    """The bound in sequences. "auto" allows a full batch and an eighth of a batch behind it, so that no place stays
    empty."""
    if setting == "auto":
        return model.max_batch + max(2, model.max_batch // 8)
    return setting


def _unshared_s(price: Price, call: Call, cached_tokens: int) -> float:
    """Seconds of an engine's work with the call that other calls cannot share: not the fixed time of steps that its prompt
    does not fill."""
    return price.work_s - price.cost.shared_seconds(call.prompt_tokens, cached_tokens)


class Engine:
    """One engine of the table."""

    __slots__ = ("estimate", "facts", "limit", "own", "record", "routable")

    def __init__(self, facts: EngineFacts, cost: CostModel, limit: int | None) -> None:
        self.facts = facts
        self.own = NO_BACKLOG
        """Calls that this gateway has sent to the engine and that have not ended."""
        self.record = outliers.FailureRecord()
        self.estimate = engine_cost.EngineCost(facts.cost, cost)
        self.limit = limit
        self.routable = RoutableEngine(facts.id, cost, facts.others)

    @property
    def cost(self) -> CostModel:
        return self.routable.cost

    @property
    def backlog(self) -> Backlog:
        """The work of all gateways on the engine."""
        return self.routable.backlog

    def set_own(self, own: Backlog) -> None:
        self.own = own
        others = self.facts.others
        self.routable.set_backlog(own + others if others else own)


class EngineTable:
    """All engines in the order of their ids."""

    def __init__(self, limit: MaxInflight, settings: outliers.OutlierSettings, *, learn_costs: bool = False) -> None:
        """Without `learn_costs` an engine with a profile keeps its profile."""
        self._limit = limit
        self._learn_costs = learn_costs
        self._settings = settings
        self.distrust = distrust.Distrust(settings)
        self._engines: dict[EngineId, Engine] = {}
        self._models: dict[CostModel, CostModel] = {}
        """Equal cost models are one object, so that a call is priced once for each kind of engine."""
        self._kinds: Sequence[tuple[CostModel, int]] = ()
        self._live_kinds: Sequence[CostModel] = ()
        self._limits = 0.0
        self._kv_tokens = 0.0
        self._kinds_are_known = False
        """Whether `_kinds`, `_live_kinds`, `_limits` and `_kv_tokens` hold for the engines as they are."""
        self._accepting: Sequence[Engine] = ()
        self._accepting_until_at_s = -math.inf
        """The instant at which `_accepting` must be computed again because an ejection ends."""

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def get(self, engine: EngineId) -> Engine | None:
        return self._engines.get(engine)

    def costs(self) -> list[CostModel]:
        """Cost models of the engines that are not down; of all engines if every engine is down."""
        live = [item.cost for item in self if item.facts.health is not Health.DOWN]
        return live or [item.cost for item in self]

    def kinds(self) -> Sequence[tuple[CostModel, int]]:
        """The distinct cost models of all engines, each with its number of engines."""
        self._count_kinds()
        return self._kinds

    def live_kinds(self) -> Sequence[CostModel]:
        """The distinct cost models of `costs`."""
        self._count_kinds()
        return self._live_kinds

    def measure(self, call: Call, cached_tokens: int) -> tuple[float, float]:
        """Seconds of the call alone, averaged over the engines, and the seconds that the whole pool takes for each of many
        calls like this one: the work that batching cannot share, divided among the engines by their speeds. No engine
        batches more than its `max_batch`, whatever its costs seem to be."""
        prices = Prices(call)
        kinds = self.kinds()
        rate = 0.0
        for cost, count in kinds:
            price = prices.of(cost, cached_tokens)
            rate += count / max(
                _unshared_s(price, call, cached_tokens), price.service_s * call.sequences / cost.max_batch, 1e-6
            )
        return prices.mean_service_s(kinds), 1.0 / rate if rate else 0.0

    def busy_part(self, call: Call, cached_tokens: int) -> float:
        """The part of the time that the call takes alone for which it keeps its engine busy, averaged over the engines: the
        rest is the fixed time of steps, which calls of a batch share."""
        prices = Prices(call)
        total = busy = 0.0
        for cost, count in self.kinds():
            price = prices.of(cost, cached_tokens)
            total += count
            busy += count * _unshared_s(price, call, cached_tokens) / price.service_s
        return min(max(busy / total, 0.0), 1.0) if total else 1.0

    def prompt_seconds(self, prompt_tokens: int, cached_tokens: int = 0) -> PromptSeconds:
        """What a prompt costs engines that hold so many tokens of it: the seconds alone on the slowest kind, and the work
        on the fastest kind, to which most calls go."""
        slowest, least = 0.0, math.inf
        for cost, _ in self.kinds():
            alone_s = cost.prefill_seconds(prompt_tokens, cached_tokens)
            slowest = max(slowest, alone_s)
            least = min(least, alone_s - cost.shared_seconds(prompt_tokens, cached_tokens))
        return PromptSeconds(slowest, least if slowest else 0.0)

    def update(self, facts: EngineFacts, own: Callable[[], Backlog]) -> None:
        """Takes in new facts; `own` gives this gateway's backlog on an engine that the table did not know."""
        known = self._engines.get(facts.id)
        if known is None:
            fresh = Engine(facts, self._interned(self._first_cost(facts)), None)
            fresh.own = own()
            self._engines[facts.id] = known = fresh
            self._engines = dict(sorted(self._engines.items()))
        known.facts = facts
        self._accepting_until_at_s = -math.inf
        self._kinds_are_known = False
        if facts.cost != known.estimate.first:
            known.estimate = engine_cost.EngineCost(facts.cost, self._first_cost(facts))
        self._set_cost(known, known.estimate.cost)
        known.set_own(known.own)

    def set_others(self, others: Mapping[EngineId, Backlog]) -> None:
        """Takes in the work of other gateways on each engine; an engine that is absent has none."""
        for item in self:
            item.facts = replace(item.facts, others=others.get(item.facts.id, NO_BACKLOG))
            item.set_own(item.own)

    def remove(self, engine: EngineId) -> None:
        self._engines.pop(engine, None)
        self.distrust.forget_engine(engine)
        self._accepting_until_at_s = -math.inf
        self._kinds_are_known = False

    def accepting(self, now: float) -> Sequence[Engine]:
        """The engines that may be given a call: up and not ejected; doubtful ones only when no other engine serves, and
        ejected ones only when there are no doubtful ones either, because a bad engine is better than none."""
        if now >= self._accepting_until_at_s:
            free = [item for item in self if not item.record.ejected(now)]
            serving = [item for item in free if item.facts.health is Health.UP]
            doubtful = [item for item in free if item.facts.health is Health.DOUBTFUL]
            self._accepting = serving or doubtful or [item for item in self if item.facts.health is Health.UP]
            ejections = [item.record.ejected_until_at_s for item in self if item.record.ejected(now)]
            self._accepting_until_at_s = min(ejections, default=math.inf)
        return self._accepting

    def may_recover(self, now: float, only: Container[EngineId] | None) -> bool:
        """Whether one of the engines of `only` gets no call just now, because its last health check failed. A call for
        these engines alone waits for it."""
        return only is not None and any(
            item.facts.health is Health.DOUBTFUL and item.facts.id in only and not item.record.ejected(now)
            for item in self
        )

    def with_room(self, now: float, only: Container[EngineId] | None = None) -> list[Engine]:
        """The engines of `accepting` that have room for another call, out of `only` if that is not None."""
        found = [item for item in self.accepting(now) if item.limit is None or item.routable.calls < item.limit]
        return found if only is None else [item for item in found if item.facts.id in only]

    def trusted(self, now: float, waiting: Waiting, engines: list[Engine]) -> list[Engine]:
        """Those of the engines that calls of its tenant do not avoid; all of them while they avoid each engine that may
        serve the call, because a bad engine is better than none. A further attempt goes to those that have failed no call
        of the tenant of late, if there are any."""
        tenant = waiting.call.tenant
        if waiting.attempt > 1 and (late := self.distrust.failed_late(now, tenant)):
            engines = [item for item in engines if item.facts.id not in late] or engines
        avoided = self.distrust.of(now, tenant)
        if not avoided:
            return engines
        others = [item.facts.id for item in self.accepting(now) if item.facts.id not in avoided]
        if not [engine for engine in others if waiting.allows(engine)]:
            return engines
        return [item for item in engines if item.facts.id not in avoided]

    def fallbacks(
        self, now: float, tenant: str, chosen: EngineId, only: Container[EngineId] | None, most: int
    ) -> list[EngineId]:
        """At most so many engines that may take a call of the tenant when the chosen one fails it, out of `only` if that is
        not None; the one with the least work comes first, and those that the tenant's calls avoid come last."""
        others = [item for item in self.with_room(now, only) if item.facts.id != chosen]
        avoided = self.distrust.of(now, tenant)
        others.sort(key=lambda item: (item.facts.id in avoided, item.backlog.work_us))
        return [item.facts.id for item in others[:most]]

    def with_reserve(self, now: float, sequences: int) -> list[Engine]:
        """The engines of `accepting` that have room for so many sequences beyond their automatic limits; a limit of the
        settings has none. Half of that room is for calls of few sequences: a call of many would take all of it."""
        if self._limit != "auto":
            return []
        return [item for item in self.accepting(now) if item.limit and _has_reserve(item, item.limit, sequences)]

    def limits(self) -> float:
        """The sum of the limits of all engines, also of those that do not serve now; infinite if one has no limit."""
        self._count_kinds()
        return self._limits

    def serving_limits(self, now: float) -> float:
        """As `limits`, of the engines of `accepting`."""
        return _sum_of_limits(self.accepting(now))

    def kv_tokens(self) -> float:
        """The sum of the KV memory of all engines."""
        self._count_kinds()
        return self._kv_tokens

    def kv_tokens_of(self, engines: Container[EngineId]) -> float:
        """As `kv_tokens`, for some engines."""
        return float(sum([item.cost.kv_tokens for item in self if item.facts.id in engines]))

    def limits_of(self, engines: Container[EngineId]) -> float:
        """As `limits`, for some engines."""
        return _sum_of_limits([item for item in self if item.facts.id in engines])

    def on_attempt(self, now: float, engine: EngineId, tenant: str, *, ok: bool, lost: bool = False) -> Result:
        """An engine did its part in a call of the tenant, or failed it; `lost`: after its answer had begun. Returns what
        follows.

        The last engine that serves is never ejected: a bad engine is better than none.
        """
        known = self._engines.get(engine)
        if known is None:
            return NOTHING_FOLLOWS
        if ok:
            known.record.succeeded(now, tenant)
            self.distrust.succeeded(now, engine, tenant)
            return NOTHING_FOLLOWS
        avoided_s = self.distrust.failed(now, engine, tenant, lost=lost)
        if not known.record.failed(now, tenant, self._settings):
            return Result(avoided_s=avoided_s)
        if not self._serving_beside(now, engine):
            self._readmit(now)
        if not self._serving_beside(now, engine):
            return Result(avoided_s=avoided_s)
        self._accepting_until_at_s = -math.inf
        return Result(ejected_s=known.record.eject(now, self._settings), avoided_s=avoided_s)

    def on_rejection(self, now: float, engine: EngineId, tenant: str) -> bool:
        """The engine rejected a call of the tenant as wrong. Returns whether another engine, which has room now, should be
        asked."""
        known = self._engines.get(engine)
        if known is None or not known.record.rejected(tenant):
            return False
        return any(item.facts.id != engine for item in self.with_room(now))

    def on_second_opinion(
        self, now: float, engine: EngineId, tenant: str, by: EngineId, *, answers: bool
    ) -> float | None:
        """Another engine answers the call of the tenant that the engine rejected, or rejects it too. Returns the seconds of
        the ejection that follows, if one does."""
        rejecting, asked = self._engines.get(engine), self._engines.get(by)
        if rejecting is None or asked is None:
            return None
        if not answers:
            rejecting.record.confirmed(tenant)
            asked.record.confirmed(tenant)
            return None
        others = self._serving_beside(now, engine)
        if not rejecting.record.contradicted(now, by, others, self._settings) or not others:
            return None
        self._accepting_until_at_s = -math.inf
        return rejecting.record.eject(now, self._settings, is_contradicted=True)

    def on_sent(self, now: float, engine: Engine, call: Call) -> None:
        """The call goes to the engine. Called before the call is a part of the engine's backlog."""
        if self._learns(engine):
            routable = engine.routable
            engine.estimate.on_sent(now, call, routable.cached_tokens, others=engine.facts.others.calls)

    def on_tokens(self, now: float, engine: Engine, call: CallId, tokens: int) -> None:
        """The engine has sent `tokens` tokens of the call so far."""
        if self._learns(engine):
            engine.estimate.on_tokens(now, call, tokens, _crowd(engine))

    def on_answer(
        self, now: float, engine: EngineId, call: CallId, prompt_tokens: int, output_tokens: int, *, streamed: bool
    ) -> None:
        """The engine has sent the whole answer, and has counted the tokens; what its steps cost is learned from it."""
        known = self._engines.get(engine)
        if known is None or not self._learns(known):
            return
        if known.estimate.on_end(
            now, call, output_tokens, _crowd(known), streamed=streamed, prompt_tokens=prompt_tokens
        ):
            self._set_cost(known, known.estimate.cost)

    def _learns(self, engine: Engine) -> bool:
        return self._learn_costs or engine.facts.cost is None

    def _serving_beside(self, now: float, engine: EngineId) -> int:
        """Other engines that are up and not ejected."""
        serving = [item.facts.id for item in self if item.facts.health is Health.UP and not item.record.ejected(now)]
        return len(serving) - serving.count(engine)

    def _readmit(self, now: float) -> None:
        """Ends the ejections that rest on the word of other engines."""
        for item in self:
            if item.record.is_contradicted and item.record.ejected(now):
                item.record.ejected_until_at_s = now

    def _set_cost(self, engine: Engine, cost: CostModel) -> None:
        engine.routable.cost = self._interned(self._alike(engine, cost))
        self._kinds_are_known = False
        engine.limit = max_inflight(self._limit, cost)

    def _first_cost(self, facts: EngineFacts) -> CostModel:
        """The profile of an engine, or what the engines whose costs are known let expect."""
        return facts.cost or engine_cost.guess([item.cost for item in self if item.estimate.is_known])

    def _alike(self, engine: Engine, cost: CostModel) -> CostModel:
        """The cost model in use that differs by less than the noise of a learned one, so that engines of one kind share
        one price; else `cost`. A profile is taken as it is."""
        if cost is engine.facts.cost:
            return cost
        others = dict.fromkeys([item.cost for item in self if item is not engine])
        return next((other for other in others if engine_cost.close(cost, other, ALIKE)), cost)

    def _count_kinds(self) -> None:
        if not self._kinds_are_known:
            # Equal cost models are one object, and an identity is cheaper to compare than eight numbers.
            counts = collections.Counter([id(item.cost) for item in self])
            models = {id(item.cost): item.cost for item in self}
            self._kinds = tuple((models[key], count) for key, count in counts.items())
            self._live_kinds = tuple({id(cost): cost for cost in self.costs()}.values())
            self._limits = _sum_of_limits(self)
            self._kv_tokens = float(sum([item.cost.kv_tokens for item in self]))
            self._kinds_are_known = True

    def _interned(self, cost: CostModel) -> CostModel:
        if len(self._models) > 4 * len(self._engines) + 64:
            self._models = {item.cost: item.cost for item in self}
        return self._models.setdefault(cost, cost)


def _has_reserve(engine: Engine, limit: int, sequences: int) -> bool:
    reserve = max(2, limit // 4)
    return engine.routable.calls + sequences <= limit + (reserve if sequences <= FEW else reserve // 2)


def _sum_of_limits(engines: Iterable[Engine]) -> float:
    return sum([math.inf if item.limit is None else item.limit for item in engines])


def _crowd(engine: Engine) -> float:
    """Sequences at the engine for each sequence of this gateway."""
    others = engine.facts.others.calls
    return 1.0 + others / max(engine.own.calls, 1) if others else 1.0
