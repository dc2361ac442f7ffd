"""What the dispatcher remembers of each call: while the call waits, and while the call is at an engine."""

from collections.abc import Container
from dataclasses import dataclass

from tidegate_policy import policies
from tidegate_policy.dispatch import prefix_index
from tidegate_policy.dispatch.routing import Prices
from tidegate_policy.model import Backlog, Call, EngineId


@dataclass(slots=True)
class Out:
    """A call at an engine."""

    call: Call
    engine: EngineId
    charge: Backlog
    attempt: int
    item: policies.QueuedRequest
    avoid: frozenset[EngineId] = frozenset()
    """Engines that have failed the call."""
    only: Container[EngineId] | None = None
    """The engines that the call may go to, which may become others while it waits; None = all."""
    awaited: tuple[prefix_index.Key, ...] = ()
    """Blocks of its prompt that the engine did not hold when the call was sent."""
    tokens: int = 0
    """Tokens that the policy was told of."""
    answered: bool = False
    """The engine has sent the first token."""


@dataclass(slots=True)
class Waiting:
    """What is remembered of a waiting call beside its place in the queue."""

    call: Call
    prices: Prices
    expires_at_s: float
    """Instant at which its wait here ends: its deadline, or the end of its time to live if it has none."""
    attempt: int = 1
    avoid: frozenset[EngineId] = frozenset()
    """Engines that have failed the call."""
    only: Container[EngineId] | None = None
    """The engines that the call may go to, which may become others while it waits; None = all."""

    def allows(self, engine: EngineId) -> bool:
        """Whether the call may go to the engine."""
        return engine not in self.avoid and (self.only is None or engine in self.only)

    @property
    def is_choosy(self) -> bool:
        """Some engine may not serve the call."""
        return bool(self.avoid) or self.only is not None
