"""Where is each engine, and which models does it list? Discovery and health checks write it; placement and relay read it.

What decisions need of an engine (its cost model, its health, the work of other gateways) goes on to the gateway core.
"""

import urllib.parse
import weakref
from collections.abc import Container, Iterable, Mapping
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
    models: tuple[str, ...] = ()
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

    def __init__(self, placements: placement.Placements) -> None:
        self._placements = placements
        self.models: list[str] = []
        """Every model that some engine lists (adapters included)."""
        self.served: str | None = None
        """The model that every engine has that may get calls: the others are adapters. None until it is known."""
        self.contexts = context_lengths.ContextLengths()
        self._listing: weakref.WeakValueDictionary[str, _Engines] = weakref.WeakValueDictionary()
        """The engines that list each adapter of which a call waits or is out."""
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
        return context_lengths.Fitting(self.contexts, tokens, listing) if self.contexts.differ_for(tokens) else listing

    def _listed(self, model: str) -> Container[EngineId] | None:
        """The engines that list an adapter, which follow what engines list later; None for the model itself, which every
        engine has that may get calls."""
        if not self.models or model == self.served:
            return None
        engines = self._listing.get(model)
        if engines is None:
            engines = self._listing[model] = _Engines(one.id for one in self._engines.values() if model in one.models)
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
        down = engine_table.Health.DOWN
        self.contexts.set(  # an engine that is down comes back: a call that only it holds fails for now, and not for ever
            {
                one.id: one.context_tokens
                for one in self._engines.values()
                if one.context_tokens is not None or one.health is not down
            }
        )
        self.models = sorted({model for engine in self._engines.values() for model in engine.models})
        for model, engines in self._listing.items():  # calls that wait have these sets
            engines.clear()
            engines.update(one.id for one in self._engines.values() if model in one.models)
