"""The answers of an engine to the operator: its state, the result of a command, and a report of quality of service."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidegate_policy.qos import Qos

SHOWN_WAITING = 1000
"""Most waiting calls that a state lists."""
KEPT_REASON = 256
"""Characters that are kept of the reason for a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Bounds of a step; 0 = the engine's own limit."""

    max_running: int = 0
    """Sequences that may run together."""
    max_step_tokens: int = 0
    """Tokens scheduled in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An engine at one instant."""

    policy: str
    policy_parameters: Mapping[str, float] = field(default_factory=dict)
    policy_reason: str = ""
    policy_age_s: float = 0.0
    bypass: bool = False
    controls: Controls = field(default_factory=Controls)
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    waiting_ids: tuple[str, ...] = ()
    """The first waiting calls in the order in which they will start."""
    waiting_by_lane: Mapping[str, int] = field(default_factory=dict)
    """The waiting calls of each lane by its name."""
    preemptions: int = 0
    fallback_reason: str = ""
    simulated_profile: str = ""
    """The profile that paces a simulated engine; empty on a real engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """A policy that has come into force."""

    policy: str
    previous: str
    reordered: int
    """Calls that waited and were sorted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchReport:
    """One window of one watcher."""

    policy: str
    policy_parameters: Mapping[str, float]
    bypass: bool
    """Whether the operator's bounds are lifted and only the regulators that protect memory act."""
    window: Qos


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The windows that one watcher receives. Each driver gives its own way to serialise the two calls."""

    cut: Callable[[], WatchReport]
    """Ends the current window and returns it."""
    close: Callable[[], None]
    """Stops counting for this watcher."""
