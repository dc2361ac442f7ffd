"""The contract of a dispatch rule."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tidegate_policy.dispatch.routing import Choice, RoutingContext
from tidegate_policy.model import Call, EngineId


class DispatchRule(ABC):
    """Ranks the engines that can take a call.

    `choose` is required. A rule that learns also overrides some of the events, which do nothing by default.
    """

    knows_caches: bool = False
    """Whether the dispatcher asks for `cached_tokens` before each `choose`."""

    @abstractmethod
    def choose(self, context: RoutingContext) -> Choice:
        """Names the engine for the call. The engines of the context are never empty."""

    def cached_tokens(self, now: float, call: Call) -> Mapping[EngineId, int]:
        """Prompt tokens of `call` that each engine's prefix cache is believed to hold; absent engines hold none.

        The dispatcher asks before `choose` and prices each engine without these tokens.
        """
        return {}

    def on_sent(self, now: float, call: Call, engine: EngineId) -> None:
        """The dispatcher sent `call` to `engine`."""
        return

    def on_end(self, now: float, call: Call, engine: EngineId) -> None:
        """`call` left `engine`: it finished, failed or was cancelled."""
        return

    def on_engine_gone(self, now: float, engine: EngineId) -> None:
        """`engine` left the pool; its caches are lost."""
        return
