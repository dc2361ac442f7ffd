"""What may be asked of a running scheduler from outside its loop, and what it tells.

`scheduler` answers when ours runs; `Fallback` answers in its place when vLLM's own runs, so that whoever asks learns why
nothing can be switched. `control` puts either on the network.
"""

from dataclasses import dataclass, field
from typing import Protocol

from tidegate_policy.qos import Qos

SHOWN_WAITING = 1000
"""Waiting calls listed in a state at most."""
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
    """A scheduler at one instant."""

    policy: str
    policy_reason: str = ""
    policy_age_s: float = 0.0
    controls: Controls = field(default_factory=Controls)
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    waiting_ids: tuple[str, ...] = ()
    """The first of those who wait, in the order in which they will start."""
    preemptions: int = 0
    fallback_reason: str = ""
    simulated_profile: str = ""
    """The profile that paces a simulated engine; empty on a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """A policy that has come into force."""

    policy: str
    previous: str
    reordered: int


class Watch(Protocol):
    """One watcher's windows."""

    def cut(self) -> tuple[str, Qos, float]:
        """The policy, the window since the last cut, and the seconds of it that the engine was busy."""

    def close(self) -> None:
        """Stops counting for this watcher."""


class ControlledEngine(Protocol):
    """Every method may be called from any thread, also while the engine is idle, and has effect when it returns."""

    def set_policy(self, name: str, reason: str) -> Switched:
        """Raises `policies.UnknownPolicy`, or `NotControllable`."""

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        """Sets those that are not None and returns all, as they are in force. Raises `NotControllable`."""

    def state(self) -> State: ...

    def watch(self) -> Watch:
        """Raises `NotControllable`."""


class Fallback:
    """The controlled engine's part where vLLM's own priority scheduler runs."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def set_policy(self, name: str, reason: str) -> Switched:
        raise self._refusal()

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        raise self._refusal()

    def state(self) -> State:
        return State(policy="priority", fallback_reason=self._reason)

    def watch(self) -> Watch:
        raise self._refusal()

    def _refusal(self) -> NotControllable:
        return NotControllable(f"vLLM's own priority scheduler runs here: {self._reason}")
