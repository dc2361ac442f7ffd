"""What an order must answer, and what it is asked with."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from tidegate_policy.model import Call

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A call in one particular queue: the call, and what its holder predicts of it."""

    call: Call
    service_s: float
    """Predicted seconds of work from here to the last token, on this engine (or the mean engine, in the gateway)."""


class Gate(Protocol):
    """Whose turn is it, among the lanes that have someone waiting?"""

    def next_lane(self, waiting: AbstractSet[int]) -> int:
        """The lane that the next pop takes. `waiting` is never empty. Must not change state."""

    def on_pop(self, lane: int, waiting: AbstractSet[int]) -> None:
        """Somebody left `lane` by being served; `waiting` are the lanes that had someone just before."""

    def copy(self) -> "Gate":
        """An independent gate in the same state: iteration walks on a copy."""


class Policy(Protocol):
    """Which waiting call goes next?"""

    @property
    def name(self) -> str:
        """The public name, as in `SetPolicy` and the `ServingPool`."""

    def lane(self, ticket: QueuedRequest) -> int:
        """The lane of a call; orders without lanes say 0."""

    def key(self, ticket: QueuedRequest) -> Key:
        """Position within the lane, smaller first. Pure, and constant while the call waits."""

    def gate(self) -> Gate:
        """A gate in its initial state, one for each queue."""


class FreeGate:
    """The gate of an order with one lane."""

    def next_lane(self, waiting: AbstractSet[int]) -> int:
        return min(waiting)

    def on_pop(self, lane: int, waiting: AbstractSet[int]) -> None:
        return None

    def copy(self) -> "FreeGate":
        return self


class OneLane:
    """The part that orders without lanes share."""

    def lane(self, ticket: QueuedRequest) -> int:
        return 0

    def gate(self) -> Gate:
        return FreeGate()
