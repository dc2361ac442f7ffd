"""The protocol that an engine implements so that `control_server` can serve EngineControl for it.

Tidegate's vLLM scheduler and the simulated engine implement `ControlledEngine` through the engine core. `Fallback`
implements it for an engine in which vLLM's own scheduler runs, so that every caller learns why the policy cannot be
switched.
"""

from collections.abc import Mapping
from typing import Protocol

from tidegate_policy.engine.engine_status import SHOWN_WAITING, Controls, State, Switched, WatchReport


class NotControllable(RuntimeError):
    """vLLM's own scheduler runs; the message says why."""


class Watch(Protocol):
    """The windows that one watcher receives."""

    def cut(self) -> WatchReport:
        """Ends the current window and returns it."""

    def close(self) -> None:
        """Stops counting for this watcher."""


class ControlledEngine(Protocol):
    """An engine as its controller sees it. Any thread may call every method, also while the engine is idle; a change is in
    force when the method returns."""

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float] | None = None, *, bypass: bool = False
    ) -> Switched:
        """A `bypass` lasts until the next switch. Raises `policies.UnknownPolicy`, `policies.BadParameter`, or
        `NotControllable`."""

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        """Sets the bounds that are not None; returns all bounds in force. Raises `NotControllable`."""

    def state(self, *, max_waiting_ids: int = SHOWN_WAITING) -> State:
        """The engine now. Its list of waiting calls costs more than the rest."""

    def watch(self) -> Watch:
        """Raises `NotControllable`."""


class Fallback:
    """The `ControlledEngine` of an engine in which vLLM's own scheduler runs."""

    def __init__(self, reason: str, policy: str) -> None:
        """`policy` is vLLM's own scheduling policy, `fcfs` or `priority`."""
        self._reason = reason
        self._policy = policy

    def set_policy(
        self, name: str, reason: str, parameters: Mapping[str, float] | None = None, *, bypass: bool = False
    ) -> Switched:
        raise self._rejection()

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        raise self._rejection()

    def state(self, *, max_waiting_ids: int = SHOWN_WAITING) -> State:
        return State(policy=self._policy, fallback_reason=self._reason)

    def watch(self) -> Watch:
        raise self._rejection()

    def _rejection(self) -> NotControllable:
        return NotControllable(f"vLLM's own {self._policy} scheduler runs here: {self._reason}")
