"""The contract of a scheduling policy, and the parts that policies without state of their own share.

A policy is an object with parameters. Each scheduler owns one, and all queues of the scheduler share it. The policy gives
each call a lane and, within the lane, a key; the smallest key goes first. `waiting_queue` keeps the calls, tells the
policy of starts, and asks for keys. The scheduler tells the policy of all other events. Each event method
returns the ids of the calls whose key or lane changed, and the queue sorts exactly these calls again.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from tidegate_policy.cost import CostModel
from tidegate_policy.model import CallId
from tidegate_policy.model import QueuedRequest as QueuedRequest

Key = tuple[float, ...]
Changed = Collection[CallId]
"""The ids of the calls whose key or lane an event changed. Ids of calls that do not wait are ignored."""
NONE_CHANGED: Changed = ()


class Computed(NamedTuple):
    """The tokens of one call that a step computed, or that all steps so far computed.

    It is a tuple because an engine makes one for each running call in each step."""

    prompt_tokens: int = 0
    output_tokens: int = 0


ONE_OUTPUT = Computed(0, 1)
"""The tokens of a call that decodes. Drivers report this object, which is recognised faster than an equal one."""

RandomSource = random.Random

GENERIC_COST = CostModel(step_s=0.02, prefill_s=1e-4)
"""The estimate of a scheduler that knows no engine. Policies compare calls, so proportions matter more than seconds."""


def _generic_cost() -> CostModel:
    return GENERIC_COST


def _nothing_cached(call_id: CallId) -> int:
    return 0


def _seeded() -> random.Random:
    return random.Random(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """The parts of its scheduler that a policy may read. The defaults suit a scheduler without an engine of its own."""

    cost: Callable[[], CostModel] = _generic_cost
    """The present estimate of the engine's costs."""
    cached_tokens: Callable[[CallId], int] = _nothing_cached
    """A probe of the prefix cache: the prompt tokens of a waiting call that the cache holds now. A gateway answers 0."""
    random: RandomSource = field(default_factory=_seeded)
    """The only source of random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter that a policy declares."""

    name: str
    default: float
    low: float
    high: float
    unit: str
    meaning: str
    """One sentence."""


class Turns(Protocol):
    """The state that shares starts between lanes. `lanes` are always the lanes in which calls wait; never empty.

    The order between two events follows from `next_lane` and `take` alone, so a queue can list it in advance. Starts that
    a policy prices by their work are priced in `take` by a mean, and corrected by later events."""

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        """The lane of the next start. This method changes nothing."""

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        """A call of `lane` started; `lanes` as they were just before."""

    def copy(self) -> "Turns":
        """An independent object in the same state, with which a queue computes the order of future starts."""


class Policy(Protocol):
    """The order in which waiting calls start."""

    @property
    def name(self) -> str:
        """The public name, as in `SetPolicy` and the `ServingPool`."""

    @property
    def parameters(self) -> Mapping[str, float]:
        """The values in force of all declared parameters."""

    @property
    def turns(self) -> Turns:
        """The state that shares starts between the lanes. All queues of a scheduler share it."""

    @property
    def lane_names(self) -> Mapping[int, str]:
        """The names of the lanes, if they are few and fixed; else empty."""

    @property
    def keys_change(self) -> bool:
        """Whether events can change the order of waiting calls: their keys, lanes or turns. If not, the scheduler need not
        report tokens."""

    @property
    def protects_progress(self) -> bool:
        """Whether a call that was preempted yields only after it has delivered a token again, if another can yield."""

    @property
    def rank_falls(self) -> bool:
        """Whether the last part of a call's rank falls by one for each second of work that is left, and the rest is
        the same for all calls. Then the call that yields first is found without the ranks of all."""

    def lane(self, item: QueuedRequest) -> int:
        """The lane of a call; a policy without lanes answers 0."""

    def key(self, item: QueuedRequest) -> Key:
        """The position within the lane, smallest first. It changes only for calls that an event method returned."""

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        """`lane` of many calls."""

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        """`key` of many calls."""

    def rank(self, item: QueuedRequest) -> Key:
        """The position among the running calls. The engine preempts the call with the greatest rank first. `item` holds
        the work that is left of the call now. All ranks of a policy can be compared."""

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        """A call entered the scheduler."""

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        """Many calls entered the scheduler, in this order. The result is that of `on_arrival` for each of them.
        A new policy may hear of them in another thread than the engine's, and then asks no probe."""

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        """A call left the queue to be served."""

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        """A step computed tokens. After a switch of the policy, the first such event holds all tokens since arrival."""

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        """A running call lost its place; `item` holds the work that is left, recomputation included."""

    def on_end(self, now: float, call_id: CallId) -> Changed:
        """A call left the scheduler: finished, failed or cancelled."""


class History(NamedTuple):
    """What happened to a call that was served before its scheduler switched to another policy."""

    item: QueuedRequest
    computed: Computed
    """All tokens since the call's arrival."""
    waits: bool = False


def replay(policy: Policy, now: float, items: Sequence[QueuedRequest], served: Sequence[History]) -> None:
    """Tells a new policy of the calls that are in its scheduler, as if it had been in force since they came: the arrivals
    of all `items`, then the service of those that were served."""
    replay_arrivals(policy, now, items)
    replay_service(policy, now, served)


def replay_arrivals(policy: Policy, now: float, items: Sequence[QueuedRequest]) -> None:
    """The first part of `replay`."""
    if _hears(policy, "on_arrival"):
        policy.on_arrivals(now, items)


def replay_service(policy: Policy, now: float, served: Sequence[History]) -> None:
    """The second part of `replay`: of the calls that were served the starts, the tokens, and the preemptions of those
    that wait again."""
    for known in served:
        policy.on_start(now, known.item)
    policy.on_tokens(now, {known.item.call.id: known.computed for known in served if any(known.computed)})
    for known in served:
        if known.waits:
            policy.on_preemption(now, known.item)


def hears(policy: Policy) -> bool:
    """Whether the policy acts on events. One that inherits all event methods of `StaticPolicy` does not, and `replay` would
    tell it nothing."""
    return any(_hears(policy, name) for name in ("on_arrival", "on_start", "on_tokens", "on_preemption", "on_end"))


def _hears(policy: Policy, name: str) -> bool:
    return getattr(type(policy), name, None) is not getattr(StaticPolicy, name)


class SingleLane:
    """The turns of a policy that has one lane."""

    def next_lane(self, lanes: AbstractSet[int]) -> int:
        return min(lanes)

    def take(self, lane: int, lanes: AbstractSet[int]) -> None:
        return None

    def copy(self) -> "SingleLane":
        return self


class StaticPolicy(ABC):
    """The base of policies: one lane, no parameters, and keys that no event changes. Subclasses override what differs."""

    name: ClassVar[str]
    PARAMETERS: ClassVar[tuple[Parameter, ...]] = ()
    lane_names: ClassVar[Mapping[int, str]] = {}
    keys_change: ClassVar[bool] = False
    protects_progress: ClassVar[bool] = True
    rank_falls: ClassVar[bool] = False

    def __init__(self, context: SchedulerContext | None = None, **parameters: float) -> None:
        """Missing parameters take their default. `policies.create` checks names and ranges."""
        self.context = context or SchedulerContext()
        defaults = {parameter.name: parameter.default for parameter in self.PARAMETERS}
        self.parameters: Mapping[str, float] = {**defaults, **parameters}
        self.turns: Turns = SingleLane()

    def lane(self, item: QueuedRequest) -> int:
        return 0

    @abstractmethod
    def key(self, item: QueuedRequest) -> Key:
        """The position within the lane, smallest first."""

    def lanes(self, items: Sequence[QueuedRequest]) -> list[int]:
        return [0] * len(items) if type(self).lane is StaticPolicy.lane else list(map(self.lane, items))

    def keys(self, items: Sequence[QueuedRequest]) -> list[Key]:
        return list(map(self.key, items))

    def rank(self, item: QueuedRequest) -> Key:
        return (self.lane(item), *self.key(item))

    def on_arrival(self, now: float, item: QueuedRequest) -> Changed:
        return NONE_CHANGED

    def on_arrivals(self, now: float, items: Sequence[QueuedRequest]) -> Changed:
        return [call_id for item in items for call_id in self.on_arrival(now, item)]

    def on_start(self, now: float, item: QueuedRequest) -> Changed:
        return NONE_CHANGED

    def on_tokens(self, now: float, computed: Mapping[CallId, Computed]) -> Changed:
        return NONE_CHANGED

    def on_preemption(self, now: float, item: QueuedRequest) -> Changed:
        return NONE_CHANGED

    def on_end(self, now: float, call_id: CallId) -> Changed:
        return NONE_CHANGED
