"""What does the gateway know of each engine, and may calls go there? Facts in, one `EngineState` for the dispatcher out.

`engines.discovery` reports the facts: address, models, health, other gateways' backlogs. Relays report how attempts ended.
The directory adds the outlier record and, for an engine without a cost profile, its calibration.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidegate_gateway import calibrate, gateway_settings, outliers
from tidegate_gateway.lifecycle import placement
from tidegate_gateway.observe import call_record
from tidegate_policy import dispatcher
from tidegate_policy.cost import CostModel
from tidegate_policy.model import NO_BACKLOG, Backlog, EngineId

logger = logging.getLogger("tidegate.gateway")

Health = Literal["up", "doubtful", "down"]
"""Up: the last health check passed. Doubtful: the last one failed, but not yet enough of them in a row. Down: it takes no
calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What discovery and health checks know of an engine."""

    id: EngineId
    url: str
    cost: CostModel | None
    """None = the engine came without a profile and is calibrated from its own calls."""
    health: Health = "down"
    models: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Engine:
    facts: EngineFacts
    record: outliers.Record = field(default_factory=outliers.Record)
    calibration: calibrate.Calibration = field(default_factory=calibrate.Calibration)

    @property
    def cost(self) -> CostModel:
        return self.facts.cost or self.calibration.cost


class EngineDirectory:
    """All engines of this gateway, as its decisions see them."""

    def __init__(
        self,
        settings: gateway_settings.Settings,
        placements: placement.Placements,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._placements = placements
        self._clock = clock
        self._engines: dict[EngineId, _Engine] = {}
        self._others: Mapping[EngineId, Backlog] = {}
        self._published: dict[EngineId, dispatcher.EngineState] = {}

    @property
    def models(self) -> list[str]:
        """Every model that some engine lists (adapters included)."""
        return sorted({model for engine in self._engines.values() for model in engine.facts.models})

    @property
    def serves(self) -> bool:
        """Whether some engine is not down."""
        return any(engine.facts.health != "down" for engine in self._engines.values())

    def costs(self) -> list[CostModel]:
        """The cost models of the engines that are not down, else of all."""
        live = [engine.cost for engine in self._engines.values() if engine.facts.health != "down"]
        return live or [engine.cost for engine in self._engines.values()]

    def url(self, engine: EngineId) -> str:
        known = self._engines.get(engine)
        return known.facts.url if known is not None else f"http://{engine}"

    def ejected(self, engine: EngineId) -> bool:
        known = self._engines.get(engine)
        return known is not None and known.record.ejected(self._clock())

    def failures(self, engine: EngineId) -> int:
        """Calls in a row that the engine failed."""
        return self._engines[engine].record.failures

    # Reports.

    def on_facts(self, facts: EngineFacts) -> None:
        """An engine appeared, or its facts were looked at again."""
        known = self._engines.get(facts.id)
        before = None if known is None else known.facts.health
        if known is None:
            self._engines[facts.id] = _Engine(facts=facts)
        else:
            known.facts = facts
        # The health of one engine decides whether calls may go to doubtful ones.
        for engine in [self._engines[facts.id]] if before == facts.health else self._engines.values():
            self._publish(engine)
        if facts.health == "down" and before in ("up", "doubtful"):
            self._placements.on_engine_lost(facts.id)

    def on_engine_gone(self, engine: EngineId) -> None:
        """Discovery no longer lists the engine."""
        del self._engines[engine]
        self._published.pop(engine, None)
        self._placements.on_engine_gone(engine)

    def on_others(self, others: Mapping[EngineId, Backlog]) -> None:
        """The backlogs that other gateways have at the engines."""
        self._others = others
        for engine in self._engines.values():
            self._publish(engine)

    def on_attempt(self, engine: EngineId, *, ok: bool) -> None:
        """An attempt ended: the engine did its part in it, or failed it."""
        known, now = self._engines.get(engine), self._clock()
        if known is None:
            return
        after = known.record.after(now, ok=ok, limits=self._settings.health)
        if after.ejected(now) and not known.record.ejected(now):
            if not self._others_serve(engine, now):
                return  # the last engine that serves is never ejected: a bad engine is better than none
            logger.warning("engine %s is ejected for %.3g s: its calls fail", engine, after.until_s - now)
        known.record = after
        self._publish(known)

    def on_answer(self, record: call_record.CallRecord) -> None:
        """An engine answered a call: learns the speed of an engine without a profile."""
        known = None if record.engine is None else self._engines.get(record.engine)
        if known is None or known.facts.cost is not None or record.call is None:
            return
        if record.sent_at_s is None or record.first_token_at_s is None or record.finished_at_s is None:
            return
        known.calibration = known.calibration.after(
            calibrate.Observation(
                prompt_tokens=record.prompt_tokens or record.call.prompt_tokens,
                tokens=round(record.tokens / record.call.sequences),
                ttft_s=record.first_token_at_s - record.sent_at_s if record.stream else None,
                whole_s=record.finished_at_s - record.sent_at_s,
                beside=(record.calls_beside + record.calls_beside_at_end) / 2,
                alone=record.calls_beside <= 0,
            )
        )
        self._publish(known)

    def _accepting(self, engine: _Engine, now: float) -> bool:
        """Whether calls may go there; to a doubtful engine they go only if every other engine is doubtful too."""
        if engine.facts.health == "down" or engine.record.ejected(now):
            return False
        return engine.facts.health == "up" or not self._others_serve(engine.facts.id, now)

    def _others_serve(self, engine: EngineId, now: float) -> bool:
        return any(
            other.facts.health == "up" and not other.record.ejected(now)
            for other in self._engines.values()
            if other.facts.id != engine
        )

    def _publish(self, engine: _Engine) -> None:
        state = dispatcher.EngineState(
            id=engine.facts.id,
            cost=engine.cost,
            cap=max_inflight(self._settings.dispatch.cap, engine.cost),
            accepting=self._accepting(engine, self._clock()),
            others=self._others.get(engine.facts.id, NO_BACKLOG),
        )
        if self._published.get(state.id) != state:
            self._published[state.id] = state
            self._placements.on_engine(state)


def max_inflight(setting: int | str | None, model: CostModel) -> int | None:
    """Calls that may be out at one engine; auto = a full batch, and enough behind it that no place in it stays empty."""
    if isinstance(setting, str):
        return model.max_batch + max(2, model.max_batch // 8)
    return setting


