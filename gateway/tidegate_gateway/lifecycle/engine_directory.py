"""Where is each engine, and which models does it list? Discovery and health checks write it; placement and relay read it.

What decisions need of an engine (its cost model, its health, the work of other gateways) goes on to the gateway core.
"""

import urllib.parse
import weakref
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from tidegate_gateway.lifecycle import context_lengths, placement
from tidegate_policy.cost import CostModel
from tidegate_policy.dispatch import engine_table
from tidegate_policy.model import NO_BACKLOG, Backlog, EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What discovery and health checks know of an engine."""

    id: EngineId
    url: str
    cost: CostModel | None
    """None = the engine came without a profile; the core learns its speed from its answers."""
    health: engine_table.Health = engine_table.Health.DOWN
    model: str | None = None
    """The model that it serves beside the gateway's; None = that of the gateway."""
    models: tuple[str, ...] = ()
    """The models that it lists: its model, and adapters."""
    context_tokens: int | None = None
    """The length of its context, if it tells it."""


def _names(endpoint: str) -> tuple[str, str, str]:
    """What may stand for IP:port: itself, and the IP, with and without the brackets of IPv6."""
    host = endpoint.rpartition(":")[0]
    return endpoint, host, host.strip("[]")


class _Engines(set[EngineId]):
    """A set that a dictionary can hold weakly."""


class EngineDirectory:
    """All engines of this gateway."""

    def __init__(self, placements: placement.Placements, *, served: str | None, others: Collection[str]) -> None:
        """`served` is the gateway's model, if the settings name it; `others` are those that they name for engines."""
        self._placements = placements
        self._declared = frozenset({served, *others} if others and served is not None else ())
        self._is_shared = bool(others)
        self.models: list[str] = sorted(self._declared)
        """Every model that some engine lists (adapters included), and those that the settings name beside each other."""
        self.served = served
        """The gateway's model. The engines that name no other one have it. None until it is known."""
        self._contexts: dict[str | None, context_lengths.ContextLengths] = {None: context_lengths.ContextLengths()}
        """By the model of the engines; None = the gateway's."""
        self._base: dict[str, str | None] = {}
        """By the name of a model or an adapter: the model of the engines that serve it; None = the gateway's. Of several
        models whose engines list a name, the gateway's has it, or else the first by name."""
        self._listing: weakref.WeakValueDictionary[str, _Engines] = weakref.WeakValueDictionary()
        """The engines that serve each model or adapter of which a call waits or is out."""
        self._engines: dict[EngineId, EngineReport] = {}
        self._others: Mapping[EngineId, Backlog] = {}

    @property
    def serves(self) -> bool:
        """Whether some engine is not down."""
        return any(engine.health is not engine_table.Health.DOWN for engine in self._engines.values())

    def url(self, engine: EngineId) -> str:
        known = self._engines.get(engine)
        return known.url if known is not None else f"http://{engine}"

    def endpoint(self, engine: EngineId) -> str:
        """The address of the engine as proxies write it: IP:port."""
        return urllib.parse.urlsplit(self.url(engine)).netloc.rpartition("@")[2]

    def candidates(
        self, model: str, tokens: int, only: Container[EngineId] | None = None
    ) -> Container[EngineId] | None:
        """The engines that may get a call of so many tokens, out of `only` if that is not None; None = all engines."""
        listing = self._listed(model)
        if only is not None and listing is not None:
            listing = frozenset(engine for engine in self._engines if engine in only and engine in listing)
        elif only is not None:
            listing = only
        contexts = self.contexts(model)
        return context_lengths.Fitting(contexts, tokens, listing) if contexts.differ_for(tokens) else listing

    def contexts(self, model: str) -> context_lengths.ContextLengths:
        """The contexts of the engines that serve `model`, or the model to which this adapter belongs."""
        return self._contexts[self._base.get(model)]

    def _listed(self, model: str) -> Container[EngineId] | None:
        """The engines that list this model or adapter, which follow what engines list later; None for the gateway's model,
        unless engines serve others too."""
        if not self._is_shared and (not self.models or model == self.served):
            return None
        engines = self._listing.get(model)
        if engines is None:
            engines = self._listing[model] = _Engines(self._serving(model))
        return engines

    def engines_at(self, endpoints: Iterable[str]) -> frozenset[EngineId]:
        """The engines at these addresses: IP:port, or an IP for all its ports."""
        wanted = set(endpoints)
        return frozenset(engine for engine in self._engines if not wanted.isdisjoint(_names(self.endpoint(engine))))

    def on_report(self, report: EngineReport) -> None:
        """An engine appeared, or its health was checked again."""
        before = self._engines.get(report.id)
        if before == report:
            return
        self._engines[report.id] = report
        self._on_change()
        self._placements.on_engine(
            engine_table.EngineFacts(
                id=report.id,
                cost=report.cost,
                health=report.health,
                others=self._others.get(report.id, NO_BACKLOG),
            )
        )
        down = engine_table.Health.DOWN
        if report.health is down and before is not None and before.health is not down:
            self._placements.on_engine_down(report.id)

    def on_engine_gone(self, engine: EngineId) -> None:
        """Discovery no longer lists the engine."""
        del self._engines[engine]
        self._on_change()
        self._placements.on_engine_gone(engine)

    def on_others(self, others: Mapping[EngineId, Backlog]) -> None:
        """The backlogs that other gateways have at the engines."""
        if others != self._others:
            self._others = others
            self._placements.on_others(others)

    def _on_change(self) -> None:
        down, engines = engine_table.Health.DOWN, self._engines.values()
        for model in {None, *(one.model for one in engines)}:
            # An engine that is down comes back: a call that only it holds fails for now, and not for ever.
            told = [
                one
                for one in engines
                if one.model == model and (one.context_tokens is not None or one.health is not down)
            ]
            self._contexts.setdefault(model, context_lengths.ContextLengths()).set(
                {one.id: one.context_tokens for one in told}
            )
        last_first = sorted(engines, key=lambda one: one.model or "", reverse=True)
        self._base = {name: one.model for one in last_first for name in one.models}
        self._base.update({name: None if name == self.served else name for name in self._declared})
        self.models = sorted({model for one in engines for model in one.models} | self._declared)
        for name, listing in self._listing.items():  # calls that wait have these sets
            listing.clear()
            listing.update(self._serving(name))

    def _serving(self, model: str) -> list[EngineId]:
        """The engines that list the model or adapter, apart from those of other models that list the same name."""
        base = self._base.get(model)
        return [one.id for one in self._engines.values() if model in one.models and one.model == base]
