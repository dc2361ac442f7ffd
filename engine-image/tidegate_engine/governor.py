"""What may be asked of a running scheduler from outside its loop, and what it tells.

`scheduler` answers when ours runs; `Fallback` answers in its place when vLLM's own runs, so that whoever asks learns why
nothing can be switched. `control` puts either on the network.
"""

from collections.abc import Mapping
from typing import Protocol

from tidegate_policy.engine.engine_status import Controls, State, Switched, WatchReport


class NotGoverned(RuntimeError):
    """vLLM's own scheduler runs; the message says why."""


class Watch(Protocol):
    """One watcher's windows."""

    def cut(self) -> WatchReport:
        """The window since the last cut."""

    def close(self) -> None:
        """Stops counting for this watcher."""


class Governor(Protocol):
    """Every method may be called from any thread, also while the engine is idle, and has effect when it returns."""

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float] | None = None) -> Switched:
        """Raises `policies.UnknownPolicy`, `policies.BadParameter`, or `NotGoverned`."""

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        """Sets those that are not None and returns all, as they are in force. Raises `NotGoverned`."""

    def state(self) -> State: ...

    def watch(self) -> Watch:
        """Raises `NotGoverned`."""


class Fallback:
    """The governor of an engine in which vLLM's own priority scheduler runs."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def set_policy(self, name: str, reason: str, parameters: Mapping[str, float] | None = None) -> Switched:
        raise self._refusal()

    def set_controls(self, *, max_running: int | None, max_step_tokens: int | None) -> Controls:
        raise self._refusal()

    def state(self) -> State:
        return State(policy="priority", fallback_reason=self._reason)

    def watch(self) -> Watch:
        raise self._refusal()

    def _refusal(self) -> NotGoverned:
        return NotGoverned(f"vLLM's own priority scheduler runs here: {self._reason}")


__all__ = ["Controls", "Fallback", "Governor", "NotGoverned", "State", "Switched", "Watch", "WatchReport"]
