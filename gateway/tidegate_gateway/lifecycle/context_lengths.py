"""Which engines have a context that holds this call?

vLLM lists the length of its context (`max_model_len`) with its models. Where the engines of a pool differ, as small cards
do from large ones, a call goes to an engine that can hold its prompt and its answer. The gateway only estimates a prompt.
So a call that an engine with a short context rejects goes on to an engine with a longer one.
"""

from collections.abc import Container, Mapping

from tidegate_policy.model import EngineId


class ContextLengths:
    """The contexts of the engines, in tokens."""

    def __init__(self) -> None:
        self.longest: int | None = None
        """Of all engines; None while one of them has not told its own."""
        self.shortest = 0
        """Of all engines, where `longest` is known."""
        self._of: Mapping[EngineId, int | None] = {}

    def set(self, contexts: Mapping[EngineId, int | None]) -> None:
        """The engines, those that are down included, and their contexts; None = unknown."""
        self._of = contexts
        known = [context for context in contexts.values() if context is not None]
        self.longest = max(known) if known and len(known) == len(contexts) else None
        self.shortest = min(known, default=0)

    def differ_for(self, tokens: int) -> bool:
        """Whether a call of about so many tokens may be too long for one engine and not for another. No engine's context is
        compared while one of them has not told its own."""
        return self.longest is not None and self.shortest != self.longest and 2 * tokens > self.shortest

    def hold(self, engine: EngineId, tokens: int) -> bool:
        """Whether the engine's context holds a call of so many tokens. If none does, the longest contexts count as if they
        did."""
        own = self._of.get(engine)
        return own is None or self.longest is None or own >= min(tokens, self.longest)

    def may_exceed(self, engine: EngineId, tokens: int) -> bool:
        """Whether a call of about so many tokens may be too long for the engine, and not for one with a longer context."""
        own = self._of.get(engine)
        return own is not None and self.longest is not None and own < min(2 * tokens, self.longest)


class Fitting(Container[EngineId]):
    """The engines that may get a call: those of `only` (None = all) whose contexts hold it. It follows what engines tell
    later."""

    def __init__(self, contexts: ContextLengths, tokens: int, only: Container[EngineId] | None) -> None:
        self._contexts = contexts
        self._tokens = tokens
        self._only = only

    def __contains__(self, engine: object) -> bool:
        return (self._only is None or engine in self._only) and self._contexts.hold(EngineId(str(engine)), self._tokens)

    def outgrows(self, engine: EngineId) -> bool:
        """The engine rejected the call. Whether the call may be too long for this engine only. Then it fits only the
        longest contexts from here on."""
        if not self._contexts.may_exceed(engine, self._tokens):
            return False
        self._tokens = max(self._tokens, self._contexts.longest or 0)
        return True
