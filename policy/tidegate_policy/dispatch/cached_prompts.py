"""How much of a call's prompt does each engine hold? Written to the engines before one is chosen."""

from collections.abc import Sequence

from tidegate_policy.dispatch import prefix_index
from tidegate_policy.dispatch.routing import RoutableEngine
from tidegate_policy.model import Call


class CachedPrompts:
    """The engines that hold a part of the prompt of the last call. Only their `cached_tokens` are not 0."""

    def __init__(self, prefixes: prefix_index.PrefixIndex) -> None:
        self._prefixes = prefixes
        self._warm: Sequence[RoutableEngine] = ()

    def look_up(self, call: Call, engines: Sequence[RoutableEngine]) -> None:
        """Tells each engine how much of the prompt it probably holds."""
        for engine in self._warm:
            engine.cached_tokens = 0
        cached = self._prefixes.cached_tokens(call)
        self._warm = [engine for engine in engines if engine.id in cached] if cached else ()
        for engine in self._warm:
            engine.cached_tokens = cached[engine.id]
