"""The values of EngineControl, and the protocol that an engine implements so that `control_server` can serve it.

`ControlledEngine` is implemented by Tidegate's vLLM scheduler and by the simulated engine. `Fallback` implements it for
an engine in which vLLM's own scheduler runs, so that every caller learns why the policy cannot be switched.
"""

from dataclasses import dataclass, field
from typing import Protocol

from tidegate_policy.qos import Qos

SHOWN_WAITING = 1000
"""A state lists at most this many waiting calls."""
KEPT_REASON = 256
"""Characters kept of the reason for a policy."""


class NotControllable(RuntimeError):
    """vLLM's own scheduler runs; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Bounds of a step; 0 = the engine's own limit."""

    max_running: int = 0
    """Sequences that may run together."""
    max_step_tokens: int = 0
    """Tokens scheduled in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a scheduler at one instant."""

    policy: str
    policy_reason: str = ""
    policy_age_s: float = 0.0
    controls: Controls = field(default_factory=Controls)
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    waiting_ids: tuple[str, ...] = ()
    """Ids of the first waiting calls, in the order in which they will start."""
    preemptions: int = 0
    fallback_reason: str = ""
    simulated_profile: str = ""
    """The profile that paces a simulated engine; empty on a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """A policy that has come into force. `reordered` counts the waiting calls that it sorted."""

    policy: str
    previous: str
    reordered: int


class Watch(Protocol):
    """The windows that one watcher receives."""

    def cut(self) -> tuple[str, Qos, float]:
        """Ends the current window: the policy, the window since the last cut, and the busy seconds of the engine in it."""

    def close(self) -> None:
        """Stops counting for this watcher."""


class ControlledEngine(Protocol):
    """An engine as its controller sees it. Any thread may call every method, also while the engine is idle; a change is in
    force when the method returns."""

    def set_policy(self, name: str, reason: str) -> Switched:
        """Raises `policies.UnknownPolicy`, or `NotControllable`."""

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        """Sets the bounds that are not None; returns all bounds in force. Raises `NotControllable`."""

    def state(self) -> State: ...

    def watch(self) -> Watch:
        """Raises `NotControllable`."""


class Fallback:
    """The `ControlledEngine` of an engine in which vLLM's own priority scheduler runs: it rejects every change."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def set_policy(self, name: str, reason: str) -> Switched:
        raise self._rejection()

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        raise self._rejection()

    def state(self) -> State:
        return State(policy="priority", fallback_reason=self._reason)

    def watch(self) -> Watch:
        raise self._rejection()

    def _rejection(self) -> NotControllable:
        return NotControllable(f"vLLM's own priority scheduler runs here: {self._reason}")
