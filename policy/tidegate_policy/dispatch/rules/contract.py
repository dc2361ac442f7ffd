"""The contract of a dispatch rule."""

from abc import ABC, abstractmethod
from typing import ClassVar

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.model import Call, EngineId


class DispatchRule(ABC):
    """Ranks the engines that can take a call.

    `choose` is required. A rule that learns also overrides some of the events, which do nothing by default.
    """

    reads_weights: ClassVar[bool] = False
    """Whether it reads `alpha` and `beta` of the settings."""

    @abstractmethod
    def choose(self, context: RoutingContext) -> Choice:
        """Names the engine for the call. The engines of the context are never empty."""

    def on_sent(self, now: float, call: Call, engine: EngineId) -> None:
        """The dispatcher sent `call` to `engine`."""
        return

    def on_end(self, now: float, call: Call, engine: EngineId) -> None:
        """`call` left `engine`: it finished, failed or was cancelled."""
        return

    def on_engine_gone(self, now: float, engine: EngineId) -> None:
        """`engine` left the pool; its caches are lost."""
        return
